"""Why a prompt token was computed: one cause of a closed set for each, and the log that remembers what was cached.

Everything before ``matched`` came from the cache. The rest of the prompt is named page by page, from the first page that was
not matched to the last:

* The *last page* (1 to page_size tokens) is computed whatever is cached, since at least one token must run: if everything
  before it was cached, or would have been, it is ``last_page_cap``. A prompt of at most one page is nothing but a last page.
* A page whose key fell out of this root's index is ``evicted``; one that is, or was, filed under another root is
  ``other_root``, and the evidence names the field that differs; one that sits in the index though it was not matched (filed
  since the probe, or another resource holds less) is ``not_fresh``.
* From the first page that is none of these to the end of the prompt the tokens are new, and the nearest cached chain says
  how: it shares a page or more and parts at token k (``diverged``), it shares less than a page (``short_prefix``), or nothing
  begins alike or goes on from there (``never_seen``). The partial last page of a new prompt belongs to this range.

Without a MissLog only the index is asked, so what was evicted, diverged or cached under another root is ``never_seen``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlab.cache.chain import PrefixChain
from kvlab.cache.index import PrefixIndex
from kvlab.cache.stream import RootName
from kvlab.spec import Miss

Ids = tuple[int, ...]


class Neighbour(NamedTuple):
    """The cached page most like the one asked for: ids shared from the page's start, its next id, its key."""

    shared: int
    next_id: int | None
    key: bytes


class MissLog:
    """Ids of indexed pages, the last 4 x num_pages keys that left the index, and the roots of this process.

    >>> log = MissLog(num_pages=4)
    >>> root = b"r" * 32
    >>> log.filed(root, RootName(b"base", "main", ""), b"", b"k" * 32, (5, 6, 7, 8))
    >>> log.nearest(root, b"", (5, 6, 9, 9)).shared
    2
    >>> log.gone(root, b"k" * 32, "evicted at step 3 for request 7")
    >>> log.fate(root, b"k" * 32)
    'evicted at step 3 for request 7'
    """

    def __init__(self, num_pages: int) -> None:
        self._max_gone = 4 * num_pages
        self._bases: dict[bytes, dict[str, Any]] = {}
        self._roots: dict[bytes, RootName] = {}
        self._root_uses: Counter[bytes] = Counter()
        self._pages: dict[tuple[bytes, bytes], tuple[bytes, Ids]] = {}  # (root, key) -> (parent key, ids)
        self._children: dict[tuple[bytes, bytes], list[tuple[Ids, bytes]]] = {}  # (root, parent key) -> sorted (ids, key)
        self._gone: OrderedDict[tuple[bytes, bytes], str] = OrderedDict()
        self._roots_of: dict[bytes, set[bytes]] = {}  # key -> roots it is or was filed under

    def __repr__(self) -> str:
        return f"MissLog({len(self._pages)} pages, {len(self._gone)} gone of at most {self._max_gone})"

    def know_root(self, base_root: bytes, fields: Mapping[str, Any]) -> None:
        """Remember the named fields a base root was made of, so that a difference can be named."""
        self._bases[base_root] = dict(fields)

    # -- what enters and leaves the index

    def filed(self, root: bytes, name: RootName, parent_key: bytes, key: bytes, ids: Ids) -> None:
        """A page entered the index."""
        if self._gone.pop((root, key), None) is None:
            self._root_uses[root] += 1
            self._roots[root] = name
            self._roots_of.setdefault(key, set()).add(root)
        self._pages[root, key] = parent_key, ids
        insort(self._children.setdefault((root, parent_key), []), (ids, key))

    def gone(self, root: bytes, key: bytes, why: str) -> None:
        """A page left the index; the oldest of those that left is forgotten when the ring is full."""
        parent_key, ids = self._pages.pop((root, key))
        siblings = self._children[root, parent_key]
        del siblings[bisect_left(siblings, (ids, key))]
        if not siblings:
            del self._children[root, parent_key]
        self._gone[root, key] = why
        if len(self._gone) > self._max_gone:
            self._forget(*self._gone.popitem(last=False)[0])

    def all_gone(self, why: str) -> None:
        """Every page left the index."""
        for root, key in list(self._pages):
            self.gone(root, key, why)

    def _forget(self, root: bytes, key: bytes) -> None:
        roots = self._roots_of[key]
        roots.discard(root)
        if not roots:
            del self._roots_of[key]
        self._root_uses[root] -= 1
        if not self._root_uses[root]:
            del self._root_uses[root], self._roots[root]

    # -- what is asked of it

    def fate(self, root: bytes, key: bytes) -> str | None:
        """Why ``key`` left the index of ``root``; None if it did not, or if that is forgotten."""
        return self._gone.get((root, key))

    def other_root(self, name: RootName, root: bytes, key: bytes) -> str | None:
        """Name the field in which another root that holds or held ``key`` differs from ``name``."""
        others = self._roots_of.get(key, set()) - {root}
        if not others:
            return None
        return f"cached under another root: {self._difference(self._roots[min(others)], name)}"

    def _difference(self, other: RootName, asking: RootName) -> str:
        if other.label != asking.label:
            return f"label {other.label!r}, not {asking.label!r}"
        if other.salt != asking.salt:
            return "salt"
        then, now = self._bases.get(other.base, {}), self._bases.get(asking.base, {})
        changed = [f for f in sorted(then.keys() | now.keys()) if then.get(f) != now.get(f)]
        return "; ".join(f"{f} {then.get(f)!r}, not {now.get(f)!r}" for f in changed) or "a field nobody named"

    def nearest(self, root: bytes, parent_key: bytes, ids: Ids) -> Neighbour | None:
        """The indexed page after ``parent_key`` that shares the most leading ids with ``ids``."""
        siblings = self._children.get((root, parent_key), [])
        at = bisect_left(siblings, (ids, b""))
        near = [_compare(ids, *page) for page in siblings[max(0, at - 1) : at + 1]]  # in sorted order the best is adjacent
        return max(near, key=lambda n: n.shared, default=None)


def _compare(ids: Ids, other: Ids, key: bytes) -> Neighbour:
    shared = 0
    while shared < min(len(ids), len(other)) and ids[shared] == other[shared]:
        shared += 1
    return Neighbour(shared, other[shared] if shared < len(other) else None, key)


class MissExplainer:
    """Names causes for one stream's prompt.

    Args:
        root: the stream's root, made of ``name``.
        log: None asks the index alone.
    """

    def __init__(self, chain: PrefixChain, index: PrefixIndex, root: bytes, name: RootName, log: MissLog | None) -> None:
        self._chain, self._index, self._root, self._name, self._log = chain, index, root, name, log

    def explain(self, matched_slots: int, cut_from: int = 0) -> tuple[Miss, ...]:
        """Causes for [matched_slots, prompt_slots): sorted, disjoint, without gaps.

        Args:
            cut_from: pages up to here matched, and the match was cut back since it ended inside a picture; 0 = it was not.
        """
        chain, size = self._chain, self._chain.page_size
        page, last = max(matched_slots, cut_from) // size, chain.lendable_pages
        causes: list[tuple[int, str, str]] = []  # from this slot on
        if cut_from > matched_slots:
            causes.append((matched_slots, *self._cut(cut_from)))
        while page < last and (known := self._known(chain.keys[page])):
            causes.append((max(matched_slots, page * size), *known))
            page += 1
        if page * size < chain.prompt_slots:
            causes.append((max(matched_slots, page * size), *(self._capped() if page == last else self._novel(page))))
        return merge_misses(self._name.label, causes, chain.prompt_slots)

    def _cut(self, cut_from: int) -> tuple[str, str]:
        start, stop = self._chain.laid.medium_around(cut_from) or (cut_from, cut_from)
        return "image_cut", f"the match of {cut_from} slots ends inside the picture in slots [{start}, {stop})"

    def _known(self, key: bytes) -> tuple[str, str] | None:
        if self._index.page_for(self._root, key) is not None:
            return "not_fresh", "cached since this prompt was probed, or another resource of the node holds less"
        if self._log is None:
            return None
        if why := self._log.fate(self._root, key):
            return "evicted", why
        if why := self._log.other_root(self._name, self._root, key):
            return "other_root", why
        return None

    def _capped(self) -> tuple[str, str]:
        if self._chain.laid.ends_with_medium:
            end = self._chain.ends[self._chain.prompt_slots]
            return self._known(end.key) or ("image_cut", "no copy of the page that the last picture ends on was kept")
        return "last_page_cap", "the last page is always computed, since at least one token must run"

    def _novel(self, page: int) -> tuple[str, str]:
        if self._log is None:
            return "never_seen", "no miss log is kept, so evicted and diverged prefixes look the same"
        size = self._chain.page_size
        ids = self._chain.ids_of_page(page)
        near = self._log.nearest(self._root, self._chain.keys[page - 1] if page else b"", ids)
        if near is None or page + near.shared == 0:
            return (
                "never_seen",
                f"no cached chain goes on from token {page * size}" if page else "no cached chain begins like this",
            )
        at = page * size + near.shared
        if self._chain.laid.has_medium(page * size, page * size + size):
            where = f"slots [{page * size}, {page * size + size}) hold a picture or part of one"
            return "diverged" if page else "short_prefix", f"{where}, and no cached page has these ids and that picture there"
        here = ids[near.shared] if near.shared < len(ids) else None
        parting = f"token {at} is {here} here and {near.next_id} in the nearest cached chain {near.key.hex()[:16]}"
        if at < size:
            return "short_prefix", f"shares {at} tokens, less than a page of {size}: {parting}"
        return "diverged", parting


def merge_misses(label: str, causes: list[tuple[int, str, str]], stop: int) -> tuple[Miss, ...]:
    """Turn (first slot, cause, evidence) marks into ranges that end at ``stop``; equal neighbours become one.

    >>> [(m.start, m.stop) for m in merge_misses("main", [(0, "evicted", "x"), (4, "evicted", "x"), (8, "never_seen", "")], 10)]
    [(0, 8), (8, 10)]
    """
    ranges: list[Miss] = []
    for i, (start, cause, evidence) in enumerate(causes):
        end = causes[i + 1][0] if i + 1 < len(causes) else stop
        if start >= end:
            continue
        if ranges and (ranges[-1].cause, ranges[-1].evidence) == (cause, evidence):
            start = ranges.pop().start
        ranges.append(Miss(label, start, end, cause, evidence))
    return tuple(ranges)
