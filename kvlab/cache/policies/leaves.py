"""Pages in the order of a rank: what most policies are made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

_PAGE_BITS = 32
_PAGE_MASK = (1 << _PAGE_BITS) - 1

#: Rank of a page that stands in another queue.
ELSEWHERE = -1


class RankHeap:
    """The pages of a queue, the lowest rank first, equal ranks by page number.

    With an index's ``num_children`` for ``absent`` these are the leaves: a page joins when it becomes one, at its own rank,
    however long it was an inner page. So the first page of a queue that may go is found without walking past the trunks
    before it.

    An entry holds the rank its page had when it was entered. Where the rank has grown since, the entry is corrected once it
    surfaces; where it has fallen, ``add`` enters the page again and the old entry is void. There are never more than two
    entries a page of the pool.

    Args:
        absent: by page, not 0 where the page does not belong here now; read live.
        rank_of: current rank of a page, ELSEWHERE if it is not of this queue.

    >>> inner, last_use = [1, 0, 0, 1], [0, 7, 5, 3]
    >>> heap = RankHeap(inner, last_use.__getitem__)
    >>> for page in (1, 2, 3):
    ...     heap.add(page)
    >>> last_use[2] = 9
    >>> heap.pop(), heap.pop(), heap.pop()
    (1, 2, None)
    """

    def __init__(self, absent: Sequence[int], rank_of: Callable[[int], int]) -> None:
        self._absent, self._rank_of = absent, rank_of
        self._heap: list[int] = []  # rank << 32 | page: one int an entry
        self._entries = [ELSEWHERE] * len(absent)  # by page: its entry that is not void
        self._max_entries = 2 * len(absent)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, page: int) -> None:
        """Enter ``page`` unless it does not belong here, or has an entry that surfaces as early."""
        if self._absent[page] or (rank := self._rank_of(page)) < 0:
            return
        entry, old = rank << _PAGE_BITS | page, self._entries[page]
        if old < 0 or entry < old:
            self._entries[page] = entry
            heappush(self._heap, entry)
            if len(self._heap) > self._max_entries:
                self._heap = [entry for entry in self._entries if entry >= 0]
                heapify(self._heap)

    def pop(self) -> int | None:
        """Take out the page of the lowest rank, None if there is none; ``add`` puts it back."""
        heap, entries, absent = self._heap, self._entries, self._absent
        while heap:
            entry = heap[0]
            page = entry & _PAGE_MASK
            if entries[page] == entry:
                rank = ELSEWHERE if absent[page] else self._rank_of(page)
                current = rank << _PAGE_BITS | page
                if rank >= 0 and current != entry:
                    entries[page] = current
                    heapreplace(heap, current)
                    continue
                entries[page] = ELSEWHERE
                heappop(heap)
                if rank >= 0:
                    return page
            else:
                heappop(heap)
        return None


def propose(
    pop: Callable[[], int | None],
    put_back: Callable[[int], None],
    num_children: Sequence[int],
    take_back: Callable[[], None] | None = None,
) -> Generator[int, None, None]:
    """Yield what ``pop`` takes out; at the end ``put_back`` what did not go, and the last page, which may have gone.

    ``take_back`` is called last, to undo what ``pop`` did besides.
    """
    passed_over: list[int] = []
    try:
        while (page := pop()) is not None:
            passed_over.append(page)
            yield page
            if num_children[page] < 0:
                passed_over.pop()
    finally:
        for page in passed_over:
            put_back(page)
        if take_back is not None:
            take_back()
