"""Which cached page follows which, and how many of them eviction could reach. Page numbers only, no keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlab.cache.arena import SINK
from kvlab.errors import IntegrityError

ABSENT = -1


class PageTree:
    """Parents, child counts and pins of the indexed pages; the arena tells it of pages that become shared or cease to be.

    A page is *pinned* while somebody besides the index owns it, or a child of it is pinned. Pins are counted along parents
    as owners come and go, so the number of pages that are not pinned is known at any time.

    The sink stands for "no parent": its counts are never read and its pin never goes, so no loop has to test for the end.
    """

    def __init__(self, num_pages: int) -> None:
        self.parents = [SINK] * num_pages
        self.num_children = [ABSENT] * num_pages
        self._pins = [0] * num_pages
        self._num_pinned = 0
        self._size = 0
        self._head_positions: dict[int, int] = {}  # of pages that follow another without counting as its child
        self.num_children[SINK], self._pins[SINK] = 0, 1

    def __len__(self) -> int:
        return self._size

    def __contains__(self, page: int) -> bool:
        return 0 < page < len(self.parents) and self.num_children[page] != ABSENT

    def is_leaf(self, page: int) -> bool:
        """True when ``page`` is here and has no children."""
        return not self.num_children[page] and page != SINK

    def position_of(self, page: int) -> int:
        """How many pages come before ``page`` in its chain."""
        steps = 0
        while self.parents[page]:
            page = self.parents[page]
            steps += 1
        return self._head_positions.get(page, 0) + steps

    def ancestors(self, page: int) -> Iterable[int]:
        """``page`` and every page it counts as a descendant of, upwards."""
        while page:
            yield page
            page = self.parents[page]

    # -- coming and going

    def follow(self, page: int, parent: int) -> None:
        """Remember that ``page`` comes after ``parent`` without being counted as its child."""
        self._head_positions[page] = self.position_of(parent) + 1

    def add_run(self, pages: Sequence[int], behind: int) -> None:
        """Add ``pages``, each the only child of the one before it, the first a child of ``behind`` (the sink: of none).

        Whoever offers a page owns it, so all of them begin pinned, as ``behind`` is.
        """
        parents, num_children, pins = self.parents, self.num_children, self._pins
        num_children[behind] += 1
        pins[behind] += 1
        for page in pages:
            parents[page] = behind
            num_children[page] = 1
            pins[page] = 2  # its owner and its child
            behind = page
        num_children[behind] = 0
        pins[behind] = 1
        self._size += len(pages)
        self._num_pinned += len(pages)

    def remove_leaf(self, page: int) -> int:
        """Take an unpinned leaf out and return its parent, the sink if it had none; ``put_back`` or ``forget`` comes next."""
        parent = self.parents[page]
        self.num_children[parent] -= 1
        self.parents[page], self.num_children[page] = SINK, ABSENT
        self._size -= 1
        return parent

    def put_back(self, page: int, parent: int) -> None:
        """Undo ``remove_leaf``, the last removal first."""
        self.parents[page], self.num_children[page] = parent, 0
        self.num_children[parent] += 1
        self._size += 1

    def forget(self, pages: Iterable[int]) -> None:
        """``pages`` were removed for good."""
        if self._head_positions:
            for page in pages:
                self._head_positions.pop(page, None)

    def withdraw(self, pages: Sequence[int]) -> None:
        """Undo ``add_run`` of pages that have one owner and no other children."""
        self.unshared(pages)
        for page in reversed(pages):
            self.remove_leaf(page)

    def clear(self, pages: Iterable[int]) -> None:
        """Take out every page; ``pages`` are all of them."""
        for page in pages:
            self.parents[page], self.num_children[page], self._pins[page] = SINK, ABSENT, 0
        self.num_children[SINK], self._pins[SINK] = 0, 1
        self._size = self._num_pinned = 0
        self._head_positions.clear()

    # -- owners

    def shared(self, pages: Sequence[int]) -> None:
        """Pin each of ``pages`` that is here; the first pin of a page pins its parent once more."""
        num_children, pins, parents = self.num_children, self._pins, self.parents
        pinned = 0
        for page in pages:
            if num_children[page] == ABSENT:
                continue
            while not pins[page]:
                pins[page] = 1
                pinned += 1
                page = parents[page]
            pins[page] += 1
        self._num_pinned += pinned

    def unshared(self, pages: Sequence[int]) -> None:
        """Take those pins away again."""
        num_children, pins, parents = self.num_children, self._pins, self.parents
        unpinned = 0
        for page in pages:
            if num_children[page] == ABSENT:
                continue
            while pins[page] == 1:
                pins[page] = 0
                unpinned += 1
                page = parents[page]
            pins[page] -= 1
        self._num_pinned -= unpinned

    def num_unpinned(self, excluding: Iterable[int] = ()) -> int:
        """Pages that are not pinned, less those that would be if ``excluding`` were held."""
        would_pin: set[int] = set()
        for page in excluding:
            while page in self and not self._pins[page] and page not in would_pin:
                would_pin.add(page)
                page = self.parents[page]
        return self._size - self._num_pinned - len(would_pin)

    # -- the invariant

    def check(self, pages: Iterable[int], num_owners: Sequence[int]) -> None:
        """Recount everything; ``pages`` are those that should be here.

        Raises:
            IntegrityError: a rule is broken; the message names it and the pages.
        """
        members = set(pages)
        here = {page for page in range(1, len(self.parents)) if page in self}
        _refuse(here ^ members, "are in the index's map or in its tree, and not in both")
        _refuse({p for p in members if self.parents[p] and self.parents[p] not in members}, "have a parent that is not indexed")
        children = Counter(self.parents[p] for p in members)
        _refuse({p for p in members if self.num_children[p] != children[p]}, "do not have as many children as they count")
        pinned = {a for p in members if num_owners[p] > 1 for a in self.ancestors(p)}
        pins = Counter(self.parents[p] for p in pinned)
        pins.update(p for p in members if num_owners[p] > 1)
        _refuse({p for p in members if self._pins[p] != pins[p]}, "do not have as many pins as they count")
        if self.num_unpinned() != len(members) - len(pinned):
            raise IntegrityError(
                f"{self.num_unpinned()} pages are counted as evictable; a recount finds {len(members) - len(pinned)}"
            )


def _refuse(pages: set[int], fault: str) -> None:
    if pages:
        raise IntegrityError(f"pages {sorted(pages)[:8]} {fault}")
