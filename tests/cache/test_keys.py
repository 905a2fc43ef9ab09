"""Page keys: the format, what may be an id, what a key depends on, and the memo that saves hashing."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tracemalloc
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cache.keys import chain, chain_ids, cut_layout, end_key, id_bytes, page_key
from kvlab.cache.memo import KeyMemo
from kvlab.cache.roots import base_root, fingerprint, stream_root
from kvlab.errors import InputError
from kvlab.spec import Item, Span

DATA = Path(__file__).parents[1] / "data"
RED, BLUE = sha256(b"red").digest(), sha256(b"blue").digest()


def picture_layout(digest: bytes = RED) -> list[Span]:
    """20 text, 30 picture, 25 text."""
    return [Span("ids", "text", 20, 20), Span("digest", "vit", 30, 1, digest), Span("ids", "text", 25, 25)]


def kvlab_answers() -> dict[str, bytes]:
    """The keys of the known-answer file, computed by kvlab."""
    answers: dict[str, bytes] = {}
    for number, key in enumerate(chain_ids([(7 * i * i + 3) % 49152 for i in range(70)], 16)):
        answers[f"text of 70 ids, page 16, page {number}"] = key
    for number, key in enumerate(chain_ids([5, 6, 7, 8, 9, 10, 11, 12, 13], 4)):
        answers[f"text of 9 ids, page 4, page {number}"] = key
    cut = cut_layout(picture_layout(), range(100, 145), 16)
    keys = cut.keys()
    for number, key in enumerate(keys):
        answers[f"picture layout, page {number}"] = key
    answers["picture layout, end of the picture"] = end_key(keys[2], cut.ids[3], cut.items[3], end=2)
    answers["smallest and largest id"] = page_key(b"", [0, 2**32 - 1])
    answers["fingerprint of mixed fields"] = fingerprint("größe", 16, b"\x00\xff")
    kv = {"page_size": 16, "dtype": "float32", "world_size": 1}
    base = base_root(["toy", bytes(32)], "TextModel", kv, [("positions", {"rope_theta": 10000.0})])
    answers["base root"] = base
    answers["root of main"] = stream_root(base, "main", "")
    answers["root of cfg_img"] = stream_root(base, "cfg_img", None)
    answers["root of cfg_img with salt"] = stream_root(base, "cfg_img", "tenant-a")
    return answers


# -- the format


def test_the_known_answers_hold() -> None:
    known = json.loads((DATA / "page_keys_v1.json").read_text(encoding="utf-8"))
    assert len(known["keys"]) == 20
    assert {name: key.hex() for name, key in kvlab_answers().items()} == known["keys"]


def test_the_independent_script_prints_the_known_answers() -> None:
    script = DATA / "page_keys_v1.py"
    assert not {"import kvlab", "from kvlab"} & set(re.findall(r"(?:import|from) kvlab", script.read_text(encoding="utf-8")))
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, check=True, encoding="utf-8").stdout
    assert json.loads(printed) == json.loads((DATA / "page_keys_v1.json").read_text(encoding="utf-8"))


def test_the_fast_chain_equals_page_by_page_hashing() -> None:
    ids = [(31 * i) % 977 for i in range(50)]
    for page_size in (1, 4, 16, 49, 50, 51):
        assert chain_ids(ids, page_size) == chain([ids[s : s + page_size] for s in range(0, 50, page_size)])


def test_a_chain_has_one_key_for_each_started_page() -> None:
    assert [len(chain_ids([7] * length, 4)) for length in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_known_keys_are_taken_over_and_only_the_rest_is_hashed() -> None:
    ids = list(range(20))
    known = chain_ids(ids[:8], 4)
    assert chain_ids(ids, 4, known=known) == chain_ids(ids, 4)
    assert chain_ids(ids, 4, known=[b"trusted"])[0] == b"trusted"


def test_more_known_pages_than_ids_are_refused() -> None:
    with pytest.raises(InputError, match="2 known pages of 4 ids are more than the 7 ids"):
        chain_ids(list(range(7)), 4, known=[b"a", b"b"])


@pytest.mark.parametrize("page_size", [0, -1, 1.5, True, "16"])
def test_a_page_size_that_is_no_positive_int_is_refused(page_size: object) -> None:
    with pytest.raises(InputError, match="page_size"):
        chain_ids([1, 2], page_size)  # type: ignore[arg-type]


# -- K2.5: the values of ids decide


def test_k2_5_different_id_lists_have_different_keys() -> None:
    lists = [[1, 23], [12, 3], [5], [65541], [0, 5], [5, 0], [1, 2, 3]]
    assert len({page_key(b"", ids) for ids in lists}) == len(lists)
    assert len({id_bytes(ids) for ids in lists}) == len(lists)


def test_k2_5_containers_of_equal_ids_have_equal_keys() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    ids = [3, 1, 40000]
    containers = [
        tuple(ids),
        (i for i in ids),
        numpy.array(ids, dtype=numpy.int32),
        numpy.array(ids, dtype=numpy.uint64),
        [numpy.int64(i) for i in ids],
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(ids, dtype=torch.int64),
    ]
    assert {page_key(b"", container) for container in containers} == {page_key(b"", ids)}
    assert id_bytes(range(5)) == id_bytes([0, 1, 2, 3, 4])


def test_k2_5_page_of_two_is_no_chain_of_two_pages_of_one() -> None:
    assert not set(chain_ids([1, 2], 2)) & set(chain_ids([1, 2], 1))


@pytest.mark.parametrize("bad", [True, False, 1.0, -1, 2**32, 2**32 + 5, "7", None, b"7", [7]])
def test_k2_5_what_is_no_id_is_refused_by_position_and_value(bad: object) -> None:
    memo = KeyMemo(page_size=2)
    for take in (id_bytes, lambda ids: page_key(b"", ids), lambda ids: chain_ids(ids, 2), memo.chain):
        with pytest.raises(InputError, match="position 3") as caught:
            take([1, 0, 5, bad, 6])
        assert repr(bad) in str(caught.value)
    assert len(memo.chain([1, 0, 5, 6])) == 2


def test_k2_5_a_bad_id_after_a_known_prefix_keeps_its_position() -> None:
    ids = list(range(8))
    memo = KeyMemo(page_size=4)
    memo.chain(ids)
    for bad in (True, -1, 2.0):
        with pytest.raises(InputError, match="position 9"):
            memo.chain([*ids, 1, bad])
        with pytest.raises(InputError, match="position 9"):
            chain_ids([*ids, 1, bad], 4, known=chain_ids(ids, 4))


@pytest.mark.parametrize("ids", ["text", 5, None, 1.5])
def test_k2_5_what_is_no_sequence_of_ids_is_refused(ids: object) -> None:
    with pytest.raises(InputError, match="token id"):
        id_bytes(ids)


def test_k2_5_bool_and_two_dimensional_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad in (torch.tensor([True, False]), torch.tensor([[1, 2]]), torch.tensor([1.0]), torch.tensor(3)):
        with pytest.raises(InputError, match="token id"):
            id_bytes(bad)


# -- K2.7: a key names everything before its page


def test_k2_7_equal_content_elsewhere_is_no_match() -> None:
    cached = chain_ids([1, 2, 3, 4, 5], 2)[:2]

    def matched(ids: list[int]) -> int:
        keys = chain_ids(ids, 2)
        return 2 * next((n for n, key in enumerate(keys) if n == 2 or key != cached[n]), len(keys))

    assert [matched(ids) for ids in ([3, 4, 9], [9, 9, 3, 4, 1], [1, 2, 9, 9, 3, 4, 0])] == [0, 0, 2]


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4))
def test_two_prompts_share_exactly_the_keys_of_their_common_pages(a: list[int], b: list[int], page_size: int) -> None:
    pages = [[ids[s : s + page_size] for s in range(0, len(ids), page_size)] for ids in (a, b)]
    common = next((n for n, (x, y) in enumerate(zip(*pages, strict=False)) if x != y), min(map(len, pages)))
    keys = [chain_ids(ids, page_size) for ids in (a, b)]
    assert keys[0][:common] == keys[1][:common]
    assert not set(keys[0][common:]) & set(keys[1][common:])


# -- layouts and media


def test_a_layout_is_cut_as_drawn() -> None:
    cut = cut_layout(picture_layout(), range(100, 145), 16)
    assert list(map(len, cut.ids)) == [16, 4, 0, 14, 11]
    assert [i for page in cut.ids for i in page] == list(range(100, 145))
    assert [[(i.start, i.offset, i.length) for i in page] for page in cut.items] == [
        [],
        [(4, 0, 30)],
        [(0, 12, 30)],
        [(0, 28, 30)],
        [],
    ]


def test_a_layout_of_one_text_span_is_plain_text() -> None:
    ids = list(range(37))
    cut = cut_layout([Span("ids", "text", 37, 37)], ids, 16)
    assert cut.keys() == chain_ids(ids, 16)


def test_another_picture_changes_the_keys_from_its_first_page_on() -> None:
    red, blue = (cut_layout(picture_layout(digest), range(45), 16).keys() for digest in (RED, BLUE))
    assert red[0] == blue[0]
    assert not set(red[1:]) & set(blue[1:])


def k1_3_layout(*spans: tuple[str, int, bytes]) -> list[bytes]:
    """Keys of spans (kind, slots, digest) at page 4; every id is 7."""
    laid_out = [Span(kind, "walk", n, n, digest) for kind, n, digest in spans]
    return cut_layout(laid_out, [7] * sum(n for kind, n, _ in spans if kind == "ids"), 4).keys()


def shared_pages(one: list[bytes], other: list[bytes]) -> int:
    assert set(one) & set(other) == set(one[: sum(a == b for a, b in zip(one, other, strict=False))])
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_k1_3_changing_the_second_picture_keeps_two_pages() -> None:
    head = (("ids", 2, b""), ("digest", 5, RED), ("ids", 2, b""))
    assert shared_pages(k1_3_layout(*head, ("digest", 3, BLUE)), k1_3_layout(*head, ("digest", 3, b"green"))) == 2


def test_k1_3_swapping_two_pictures_keeps_no_page() -> None:
    one = k1_3_layout(("ids", 2, b""), ("digest", 5, RED), ("ids", 2, b""), ("digest", 3, BLUE))
    other = k1_3_layout(("ids", 2, b""), ("digest", 5, BLUE), ("ids", 2, b""), ("digest", 3, RED))
    assert shared_pages(one, other) == 0


def test_k1_3_one_picture_of_six_slots_is_not_two_of_three() -> None:
    assert shared_pages(k1_3_layout(("digest", 6, RED)), k1_3_layout(("digest", 3, RED), ("digest", 3, RED))) == 0


def test_k1_3_a_picture_shifted_by_one_token_shares_no_page() -> None:
    one, other = (k1_3_layout(("ids", n, b""), ("digest", 6, RED)) for n in (1, 2))
    assert shared_pages(one, other) == 0


def test_where_a_picture_stands_among_the_ids_of_a_page_matters() -> None:
    assert page_key(b"", [7, 7], [Item(1, 0, 1, RED)]) != page_key(b"", [7, 7], [Item(2, 0, 1, RED)])


def test_an_end_key_forgets_what_follows_the_picture_on_its_page() -> None:
    cuts = [
        cut_layout(picture_layout(digest), ids, 16) for digest, ids in ((RED, range(45)), (RED, [*range(20), *range(50, 75)]))
    ]
    ends = [end_key(b"before", cut.ids[3], cut.items[3], end=2) for cut in cuts]
    assert ends[0] == ends[1]
    assert cuts[0].keys()[3] != cuts[1].keys()[3]
    assert ends[0] != end_key(b"before", cuts[0].ids[3], [Item(0, 28, 30, BLUE)], end=2)


def test_an_end_key_keeps_the_ids_before_the_picture() -> None:
    one = end_key(b"", [5, 6, 7, 8], [Item(2, 0, 3, RED)], end=5)
    assert one == page_key(b"", [5, 6], [Item(2, 0, 3, RED)])
    assert one == end_key(b"", [5, 6, 9], [Item(2, 0, 3, RED), Item(6, 0, 2, BLUE)], end=5)


@pytest.mark.parametrize(
    ("spans", "num_ids", "message"),
    [
        ([Span("ids", "text", 5, 5)], 4, "5 slots and 4 ids"),
        ([Span("audio", "text", 5, 5)], 0, "kind 'audio'"),
        ([Span("ids", "text", 0, 0)], 0, "0 slots"),
        ([Span("digest", "vit", 5, 1)], 0, "without a digest"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(spans: list[Span], num_ids: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cut_layout(spans, list(range(num_ids)), 16)


# -- the memo


def test_the_memo_answers_as_without_it() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(40))] for _ in range(300)]
    for max_bytes in (1 << 20, 6000, 0):
        memo = KeyMemo(page_size=4, max_bytes=max_bytes)
        for ids in prompts:
            assert memo.chain(ids) == chain_ids(ids, 4)
            assert memo.num_bytes <= max_bytes


def test_a_follow_up_hashes_only_what_is_new() -> None:
    memo = KeyMemo(page_size=4)
    memo.chain(list(range(42)))
    assert memo.hashed_pages == 11
    memo.chain(list(range(50)))
    assert memo.hashed_pages == 11 + 3  # pages 10, 11 and the partial page 12


def test_a_shared_system_prompt_is_hashed_once() -> None:
    memo = KeyMemo(page_size=4)
    for question in range(20):
        memo.chain([*range(40), 100 + question] * 1)
    assert memo.hashed_pages == 10 + 20


def test_remembered_keys_are_used() -> None:
    memo, ids = KeyMemo(page_size=4), list(range(12))
    memo.remember(ids, chain_ids(ids, 4))
    assert memo.chain([*ids, 5]) == chain_ids([*ids, 5], 4)
    assert memo.hashed_pages == 1


def test_the_memo_forgets_the_least_recently_used_tail_first() -> None:
    memo = KeyMemo(page_size=4)
    trunk = list(range(400))
    memo.chain([*trunk, *[1] * 40])
    one_tail = memo.num_bytes
    memo.chain([*trunk, *[2] * 40])
    memo.max_bytes = memo.num_bytes + 50
    memo.chain([*trunk, *[1] * 40])
    memo.chain([*trunk, *[3] * 40])
    assert memo.num_bytes > one_tail
    hashed = memo.hashed_pages
    memo.chain([*trunk, *[1] * 40])
    assert memo.hashed_pages == hashed
    memo.chain([*trunk, *[2] * 40])
    assert memo.hashed_pages == hashed + 10


def test_an_emptied_memo_counts_no_bytes() -> None:
    memo = KeyMemo(page_size=4)
    for tail in range(30):
        memo.chain([*range(tail * 3), *[tail] * 9])
    memo.max_bytes = 0
    memo.chain([1])
    assert (memo.num_bytes, repr(memo)) == (0, "KeyMemo(0 runs, 0 of 0 bytes)")


def test_the_memo_counts_the_bytes_it_holds() -> None:
    rng = random.Random(5)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        memo = KeyMemo(page_size=16)
        for _ in range(300):
            memo.chain([rng.randrange(9, 50000) for _ in range(rng.randrange(100, 600))])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 < memo.num_bytes / held < 1.25
