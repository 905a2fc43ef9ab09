"""Sharing without a model: what requests with a common prefix list and hold."""

from __future__ import annotations

import pytest

from kvlab.errors import InputError
from kvlab.lab.sharing import share_pages
from kvlab.recorder import Recorder


def page_lists(events: Recorder) -> list[list[int]]:
    return list(events.replay().streams.values())


def test_requests_list_the_same_pages_up_to_the_last_whole_shared_one() -> None:
    assert page_lists(share_pages(2, shared_tokens=12, own_tokens=3, page_size=4)) == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_a_shared_prefix_that_ends_inside_a_page_shares_only_the_pages_before() -> None:
    assert page_lists(share_pages(2, shared_tokens=11, own_tokens=3, page_size=4)) == [[1, 2, 3, 4], [1, 2, 5, 6]]


def test_equal_prompts_share_all_but_the_last_page() -> None:
    assert page_lists(share_pages(2, shared_tokens=12, own_tokens=0, page_size=4)) == [[1, 2, 3], [1, 2, 4]]


def test_nothing_shared_lists_nothing_twice() -> None:
    lists = page_lists(share_pages(3, shared_tokens=0, own_tokens=8, page_size=4))
    assert sorted(page for pages in lists for page in pages) == [1, 2, 3, 4, 5, 6]


def test_two_runs_leave_the_same_log() -> None:
    logs = [list(share_pages(3, shared_tokens=20, own_tokens=5)) for _ in range(2)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("requests", "shared", "own"), [(0, 1, 1), (1, 0, 0), (1, -1, 5), (1, 5, -1)])
def test_prompts_that_cannot_be_are_refused(requests: int, shared: int, own: int) -> None:
    with pytest.raises(InputError, match=f"{requests} requests of {shared} shared and {own} own tokens"):
        share_pages(requests, shared_tokens=shared, own_tokens=own)


def test_a_pool_too_small_says_so() -> None:
    with pytest.raises(InputError, match="pool of 3 usable pages has no room for request 2"):
        share_pages(2, shared_tokens=4, own_tokens=8, page_size=4, num_pages=4)
