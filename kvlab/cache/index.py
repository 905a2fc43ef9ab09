"""The prefix cache proper: per root, a map from page key to page, and which of its pages may go.

The index is a second owner of arena pages. Which leaf goes first is a policy's; that only leaves go, that nobody else's
page goes, and the accounting are the index's, under every policy.

>>> from kvlab.cache.arena import PageArena
>>> arena = PageArena(num_pages=8)
>>> index = PrefixIndex(arena)
>>> pages = arena.acquire(3)
>>> index.insert_run(b"root", [b"k1", b"k2", b"k3"], pages, parent=None)
[1, 2, 3]
>>> index.evict(1), index.evictable_count()         # a stream still owns them
(0, 0)
>>> arena.release(pages)
>>> index.lookup(b"root", [b"k1", b"k2", b"other"])
[1, 2]
>>> index.evict(1), index.lookup(b"root", [b"k1", b"k2", b"k3"])   # the tail goes before the trunk
(1, [1, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import cast

from kvlab.cache.arena import SINK, PageArena
from kvlab.cache.evicting import PATIENCE, Evictor, policy_failed
from kvlab.cache.policies import EvictionPolicy, RetentionPolicy, make_policy
from kvlab.cache.tree import PageTree
from kvlab.errors import InputError, IntegrityError


@dataclass
class IndexCounters:
    """What the index did since it was made. ``skipped_live``: proposals passed over because a stream owns the page."""

    lookups: int = 0
    matched_pages: int = 0
    inserts: int = 0
    race_losses: int = 0
    evictions: int = 0
    skipped_live: int = 0


class PrefixIndex:
    """Maps (root, key) to a page of ``arena``. It uses the lock of whoever holds the arena's.

    ``num_children``, ``stamps`` and ``keys``, by page, are there to read, never to write.

    Args:
        policy: a name, or an EvictionPolicy of one's own; None = least recently used leaves first.
    """

    def __init__(self, arena: PageArena, policy: str | EvictionPolicy | None = None) -> None:
        self.arena = arena
        self.num_pages = arena.num_pages
        self.policy = make_policy("lru" if policy is None else policy)
        self.counters = IndexCounters()
        self.clock = 0  # ticks on every run that enters and on every lookup that matches
        self._maps: dict[bytes, dict[bytes, int]] = {}
        self.keys = [b""] * self.num_pages
        self._roots = [b""] * self.num_pages
        self.stamps = [0] * self.num_pages
        self._tree = PageTree(self.num_pages)
        self.num_children = self._tree.num_children
        self._evictor = Evictor(self._tree, arena.num_owners, self.stamps, self.policy)
        arena.attach(self._tree)
        self.policy.attach(self)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        counts = f"{len(self)} pages, {self.evictable_count()} evictable, {len(self._maps)} roots"
        return f"PrefixIndex({counts}, {self.policy.name})"

    # -- reading

    def lookup(self, root: bytes, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest indexed prefix of ``keys``. All of them count as used now, also those a caller then drops."""
        self.counters.lookups += 1
        pages = self.peek(root, keys)
        if pages:
            self.clock = stamp = self.clock + 1
            stamps = self.stamps
            for page in pages:
                stamps[page] = stamp
            self.counters.matched_pages += len(pages)
            try:
                self.policy.touched(pages, stamp)
            except Exception as error:
                raise policy_failed(self.policy, "a lookup", error) from error
        return pages

    def peek(self, root: bytes, keys: Sequence[bytes]) -> list[int]:
        """Like ``lookup``, and nothing counts as used."""
        found = self._maps.get(root)
        if not found:
            return []
        return cast("list[int]", list(takewhile(bool, map(found.get, keys))))  # page 0 is never indexed: bool means found

    def page_for(self, root: bytes, key: bytes) -> int | None:
        """The page indexed under ``key``, None if there is none."""
        return self._maps.get(root, {}).get(key)

    def pages(self) -> Iterator[int]:
        """Every page the index owns."""
        for found in self._maps.values():
            yield from found.values()

    def roots(self) -> list[bytes]:
        """Every root that has pages."""
        return list(self._maps)

    def is_leaf(self, page: int) -> bool:
        """True when ``page`` is indexed and no indexed page counts as its child."""
        return self._tree.is_leaf(page)

    def key_of(self, page: int) -> bytes | None:
        """Key of ``page``, None when it is not indexed."""
        return self.keys[page] or None

    def root_of(self, page: int) -> bytes | None:
        """Root of ``page``, None when it is not indexed."""
        return self._roots[page] or None

    def stamp_of(self, page: int) -> int:
        """Clock of the last insert or matching lookup of ``page``, 0 when it is not indexed."""
        return self.stamps[page]

    def parent_of(self, page: int) -> int | None:
        """The page that ``page`` counts as a child of, None if there is none."""
        return self._tree.parents[page] or None

    def position_of(self, page: int) -> int | None:
        """How many pages come before ``page`` in its chain, None when it is not indexed."""
        return self._tree.position_of(page) if page in self._tree else None

    # -- storing

    def insert(self, root: bytes, key: bytes, page: int, parent: int | None) -> bool:
        """File ``page`` under ``key`` behind ``parent``: seal it and become an owner. The first writer of a key wins.

        Behind a parent that only the index owns, the page enters without counting as its child; otherwise a page in use
        would pin one that the pool counts as evictable.

        Returns:
            False if the key was taken; then nothing changed.

        Raises:
            IntegrityError: the parent is not indexed, the page is free or indexed under another key, or the policy raised.
        """
        inserts = self.counters.inserts
        self.insert_run(root, (key,), (page,), parent)
        return self.counters.inserts > inserts

    def insert_run(self, root: bytes, keys: Sequence[bytes], pages: Sequence[int], parent: int | None) -> list[int]:
        """Insert ``pages`` one after another, each behind the page indexed before it.

        Returns:
            The page indexed under each key: the own one, or the one that was there first.

        Raises:
            IntegrityError: as ``insert``; the pages before the one at fault stay entered.
        """
        if len(keys) != len(pages):
            raise InputError(f"{len(keys)} keys for {len(pages)} pages; give one key a page")
        if parent is not None and parent not in self._tree:
            raise IntegrityError(f"parent page {parent} is not indexed; a page is filed behind an indexed page or behind none")
        if SINK in pages:
            raise IntegrityError("page 0 is the sink: what is written there belongs to nobody, so it has no key")
        self.arena.require_owned(pages, "indexed")
        found = self._maps.setdefault(root, {})
        winners: list[int] = []
        try:
            while (done := len(winners)) < len(keys):
                winner = found.get(keys[done])
                if winner is None:
                    winners += self._enter(root, found, keys[done:], pages[done:], parent)
                else:
                    self.counters.race_losses += winner != pages[done]
                    winners.append(winner)
                parent = winners[-1]
        finally:
            if not found:
                self._maps.pop(root, None)
        return winners

    def _enter(
        self, root: bytes, found: dict[bytes, int], keys: Sequence[bytes], pages: Sequence[int], parent: int | None
    ) -> list[int]:
        """Enter pages, each as the child of the one before, up to the first that cannot; at least one."""
        self._refuse_indexed(pages[0], keys[0])
        key_of, root_of, stamps = self.keys, self._roots, self.stamps
        self.clock = stamp = self.clock + 1
        entered: list[int] = []
        for key, page in zip(keys, pages, strict=True):
            if key_of[page] or found.setdefault(key, page) != page:
                break
            key_of[page], root_of[page], stamps[page] = key, root, stamp
            entered.append(page)
        self._join(entered, parent)
        try:
            self.policy.inserted(entered, stamp)
            self.policy.became_leaf(entered[-1])
        except Exception as error:
            self._withdraw(entered)
            raise policy_failed(self.policy, "an insert", error) from error
        self.counters.inserts += len(entered)
        return entered

    def _join(self, entered: list[int], parent: int | None) -> None:
        """Put new pages into the tree and become their owner."""
        if parent is not None and self.arena.num_owners[parent] < 2:
            self._tree.follow(entered[0], parent)
            parent = None
        self._tree.add_run(entered, SINK if parent is None else parent)
        self.arena.adopt(entered)

    def _withdraw(self, entered: list[int]) -> None:
        """Undo the entering of pages that the policy would not have."""
        self._tree.withdraw(entered)
        for page in reversed(entered):
            with suppress(Exception):
                self.policy.removed(page)
        self._drop(entered)

    def _refuse_indexed(self, page: int, key: bytes) -> None:
        if self.keys[page]:
            old, new = self.keys[page].hex()[:16], key.hex()[:16]
            raise IntegrityError(f"page {page} is indexed under key {old} and was offered under {new}; a page has one key")

    def retain(self, pages: Sequence[int], priority: int, duration_s: float | None) -> None:
        """Ask the policy to keep indexed ``pages`` as RetentionPolicy has it.

        Raises:
            InputError: it keeps no retention.
        """
        if not isinstance(self.policy, RetentionPolicy):
            raise InputError(f"policy {self.policy.name} cannot retain pages for a time; use policy 'priority'")
        try:
            self.policy.retain(pages, priority, duration_s)
        except Exception as error:
            raise policy_failed(self.policy, "being asked to retain pages", error) from error

    # -- letting go

    def evictable_count(self, excluding: Iterable[int] = ()) -> int:
        """Pages that eviction could free: nobody else owns them or a page behind them.

        Args:
            excluding: pages about to be held; they and what they would pin are left out.
        """
        return self._tree.num_unpinned(excluding)

    def evict(self, n: int, on_evicted: Callable[[int, bytes, bytes], None] | None = None) -> int:
        """Free up to ``n`` pages, leaves first, in the policy's order.

        Args:
            on_evicted: called with (page, root, key) of each, once all are free.

        Returns:
            How many were freed: less than ``n`` when no more could be.

        Raises:
            IntegrityError: the policy misbehaved; then nothing was evicted.
        """
        n = min(n, self.evictable_count())
        victims = self._evictor.take(n) if n > 0 else []
        names = [(page, self._roots[page], self.keys[page]) for page in victims] if on_evicted is not None else []
        self._drop(victims)
        self.counters.evictions += len(victims)
        self.counters.skipped_live = self._evictor.num_skipped_live
        if on_evicted is not None:
            for name in names:
                on_evicted(*name)
        return len(victims)

    def _drop(self, pages: list[int]) -> None:
        """Forget the keys of pages that left the tree, and let go of them. A root goes with its last page."""
        maps, key_of, root_of, stamps = self._maps, self.keys, self._roots, self.stamps
        for page in pages:
            found = maps[root_of[page]]
            del found[key_of[page]]
            if not found:
                del maps[root_of[page]]
            key_of[page] = root_of[page] = b""
            stamps[page] = 0
        self._tree.forget(pages)
        self.arena.release(pages)

    def clear(self) -> list[int]:
        """Drop every entry and let go of its page; pages that streams own stay theirs.

        Returns:
            The pages that were indexed.
        """
        dropped = list(self.pages())
        self._tree.clear(dropped)
        self.policy.attach(self)
        self._drop(dropped)
        return dropped

    # -- the invariant

    def check(self) -> None:
        """Recount everything the slow way.

        Raises:
            IntegrityError: a rule is broken; the message names the rule and the pages.
        """
        pages = list(self.pages())
        for root, found in self._maps.items():
            for key, page in found.items():
                if self.keys[page] != key or self._roots[page] != root:
                    own = self.keys[page].hex()[:16] or "none"
                    raise IntegrityError(f"key {key.hex()[:16]} maps to page {page}, which has key {own}; a page has one key")
        if (recorded := sum(map(bool, self.keys))) != len(pages):
            raise IntegrityError(f"{recorded} pages record a key and the maps name {len(pages)}; they must be the same pages")
        if not all(self._maps.values()):
            raise IntegrityError("a root without pages is kept; its map must go with its last page")
        if loose := [page for page in pages if not self.arena.is_sealed(page) or not self.arena.owners(page)]:
            raise IntegrityError(f"indexed pages {loose[:8]} are not sealed or not owned; the index owns and seals its pages")
        self._tree.check(pages, self.arena.num_owners)
        proposed = islice(self.policy.candidates(), PATIENCE * self.num_pages)
        if lost := {page for page in pages if self.is_leaf(page)}.difference(proposed):
            raise IntegrityError(f"policy {self.policy.name} does not propose leaves {sorted(lost)[:8]}; they could never go")
