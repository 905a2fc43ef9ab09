"""Asks a policy which pages go, and believes nothing it says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from kvlab.cache.policies.base import EvictionPolicy
from kvlab.cache.tree import PageTree
from kvlab.errors import IntegrityError

#: Proposals passed over in a row, as a multiple of the pool, after which a policy is taken to have no end.
PATIENCE = 4


def policy_failed(policy: EvictionPolicy, occasion: str, error: Exception) -> IntegrityError:
    """Return the error to raise when a policy raised; what it was asked for is undone."""
    return IntegrityError(f"policy {policy.name} raised {type(error).__name__} on {occasion}: {error}; nothing changed")


class Evictor:
    """Takes leaves that nobody else owns out of the tree, in the policy's order.

    Args:
        num_owners: by page.
        stamps: by page.
    """

    def __init__(self, tree: PageTree, num_owners: Sequence[int], stamps: Sequence[int], policy: EvictionPolicy) -> None:
        self._tree, self._num_owners, self._stamps, self._policy = tree, num_owners, stamps, policy
        self.num_skipped_live = 0

    def take(self, n: int) -> list[int]:
        """Take ``n`` pages out, of at least as many that are not pinned.

        Raises:
            IntegrityError: the policy raised, proposed what is no page, no end of pages, or too few. The tree is as it was, and
                the policy has been told that the pages it gave up came back.
        """
        taken: dict[int, int] = {}  # page -> its parent
        try:
            self._take(n, taken)
        except BaseException as error:
            self._put_back(taken)
            if isinstance(error, IntegrityError) or not isinstance(error, Exception):
                raise
            raise policy_failed(self._policy, f"being asked for {n} pages", error) from error
        return list(taken)

    def _take(self, n: int, taken: dict[int, int]) -> None:
        tree, num_owners, policy = self._tree, self._num_owners, self._policy
        num_children, num_pages = tree.num_children, len(num_owners)
        skipped = passed = 0
        with closing(policy.candidates()) as proposals:
            for page in proposals:
                if not 0 < page < num_pages:
                    raise IntegrityError(
                        f"policy {policy.name} proposed {page!r}, which is no page of this pool of {num_pages}"
                    )
                if num_children[page] or num_owners[page] > 1:
                    skipped += not num_children[page]
                    passed += 1
                    if passed > PATIENCE * num_pages:
                        raise IntegrityError(f"policy {policy.name} proposed {passed} pages in a row of which none could go")
                    continue
                taken[page] = parent = tree.remove_leaf(page)
                passed = 0
                policy.removed(page)
                if parent and not num_children[parent]:
                    policy.became_leaf(parent)
                if len(taken) == n:
                    break
        if len(taken) < n:
            raise IntegrityError(f"{n} pages could go and policy {policy.name} proposed {len(taken)}; it lost some")
        self.num_skipped_live += skipped

    def _put_back(self, taken: dict[int, int]) -> None:
        for page, parent in reversed(taken.items()):
            self._tree.put_back(page, parent)
        with suppress(Exception):  # it failed already; what is said of it is why
            for page in reversed(taken):
                self._policy.inserted((page,), self._stamps[page])
            for page in taken:
                if self._tree.is_leaf(page):
                    self._policy.became_leaf(page)
