"""TorchPagedAttention against attention written out token by token in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import CHUNK_TOKENS, TorchPagedAttention
from kvlab.errors import InputError, IntegrityError
from kvlab.spec import KVLayout, StepRow, StepTables

PAGE = 4
KV_HEADS, HEAD_DIM, HEADS = 2, 8, 6
# Largest |difference| over the cases here: 5.0e-7 in float32, 1.0e-15 in float64, 0.0074 in bfloat16.
TOLERANCE = {"float32": 2e-6, "float64": 5e-15, "bfloat16": 0.02}


@dataclass
class Paged:
    """Rows of random q, k, v, run through pages; ``done`` tokens of each are written already."""

    dtype: str = "float32"
    compute_dtype: str = "float32"
    num_pages: int = 120
    seed: int = 0
    streams: dict[int, list[Tensor]] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = KVLayout(2, KV_HEADS, HEAD_DIM, PAGE, dtype=self.dtype, compute_dtype=self.compute_dtype)
        self.store = KVStore(layout, self.num_pages)
        self.attention = TorchPagedAttention(self.store, num_heads=HEADS)
        self.free = random.Random(self.seed).sample(range(1, self.num_pages), self.num_pages - 1)

    def add(self, rid: int, tokens: int, pages: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(1000 + rid)
        q, k, v = (torch.randn(tokens, n, HEAD_DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.streams[rid] = [x.to(getattr(torch, self.compute_dtype)) for x in (q, k, v)]
        self.pages[rid] = pages or [self.free.pop() for _ in range(-(-tokens // PAGE))]
        self.done[rid] = 0

    def step(self, spans: dict[int, int], causal: bool = True, layer: int = 1) -> list[Tensor]:
        """Run the next tokens of some rows; returns one [tokens, heads, head_dim] a row."""
        rows, parts = [], []
        for rid, span in spans.items():
            start, stop = self.done[rid], self.done[rid] + span
            rows.append(StepRow(rid, "main", self.pages[rid][: -(-stop // PAGE)], stop, span))
            parts.append([x[start:stop] for x in self.streams[rid]])
            self.done[rid] = stop
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        self.attention.begin(StepTables(PAGE, tuple(rows), causal=causal))
        self.attention.write(layer, k, v)
        return list(self.attention.attend(layer, q).split(list(spans.values())))

    def peek(self, spans: dict[int, int], causal: bool = False, layer: int = 1) -> list[Tensor]:
        """Run the next tokens of some rows and keep nothing."""
        rows = [
            StepRow(rid, "main", self.pages[rid][: -(-self.done[rid] // PAGE)], self.done[rid], n) for rid, n in spans.items()
        ]
        parts = [[x[self.done[rid] : self.done[rid] + n] for x in self.streams[rid]] for rid, n in spans.items()]
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        self.attention.begin(StepTables(PAGE, tuple(rows), causal=causal, commit=False))
        self.attention.write(layer, k, v)
        return list(self.attention.attend(layer, q).split(list(spans.values())))

    def expected(self, rid: int, start: int, stop: int, causal: bool = True) -> Tensor:
        q, k, v = (x.double() for x in self.streams[rid])
        out = torch.empty(stop - start, HEADS, HEAD_DIM, dtype=torch.float64)
        for token in range(start, stop):
            seen = token + 1 if causal else stop
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = (k[:seen, kv_head] @ q[token, head] * HEAD_DIM**-0.5).softmax(0)
                out[token - start, head] = weights @ v[:seen, kv_head]
        return out


def assert_near(got: Tensor, expected: Tensor, dtype: str) -> None:
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [[11], [150], [4, 7], [5, 1, 1, 1], [CHUNK_TOKENS + 3, CHUNK_TOKENS + 2, 1], [1, 3, 8]])
def test_attention_through_pages_is_attention_over_the_whole_row(dtype: str, splits: list[int]) -> None:
    paged = Paged(dtype, dtype)
    paged.add(1, sum(splits))
    out = torch.cat([paged.step({1: span})[0] for span in splits])
    assert out.dtype == getattr(torch, dtype)
    assert_near(out, paged.expected(1, 0, sum(splits)), dtype)


def test_rows_of_different_lengths_and_spans_share_a_step() -> None:
    paged = Paged()
    for rid, tokens in ((1, 9), (2, 80), (3, 6)):
        paged.add(rid, tokens)
    first = paged.step({1: 8, 3: 5})
    second = paged.step({1: 1, 2: 80, 3: 1})
    assert_near(torch.cat([first[0], second[0]]), paged.expected(1, 0, 9), "float32")
    assert_near(second[1], paged.expected(2, 0, 80), "float32")
    assert_near(torch.cat([first[1], second[2]]), paged.expected(3, 0, 6), "float32")


def test_a_block_that_is_not_causal_sees_the_prefix_and_all_of_itself() -> None:
    paged = Paged()
    paged.add(1, 90)
    paged.step({1: 10})
    assert_near(paged.step({1: 80}, causal=False)[0], paged.expected(1, 10, 90, causal=False), "float32")


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_that_are_not_kept_see_the_pages_and_their_own_row(causal: bool) -> None:
    paged = Paged()
    for rid, tokens in ((1, 90), (2, 14), (3, 9)):
        paged.add(rid, tokens)
    paged.step({1: 10, 3: 8})  # row 2 reads no page at all
    outs = paged.peek({1: 80, 2: 14, 3: 1}, causal=causal)
    for out, (rid, start, stop) in zip(outs, ((1, 10, 90), (2, 0, 14), (3, 8, 9)), strict=True):
        assert_near(out, paged.expected(rid, start, stop, causal=causal), "float32")


def test_tokens_that_are_not_kept_change_no_page_and_next_layers_need_their_own() -> None:
    paged = Paged()
    paged.add(1, 20)
    paged.step({1: 9})
    before = paged.store.pages.clone()
    first, again = paged.peek({1: 11})[0], paged.peek({1: 11})[0]
    assert torch.equal(paged.store.pages, before)
    assert torch.equal(first, again)
    with pytest.raises(IntegrityError, match="layer 0 attends in a step that keeps nothing, before write"):
        paged.attention.attend(0, paged.streams[1][0][9:])


def test_a_block_is_the_same_kept_or_not() -> None:
    paged = Paged()
    paged.add(1, 40)
    paged.step({1: 10})
    seen = paged.peek({1: 30})[0]
    assert_near(seen, paged.step({1: 30}, causal=False)[0].double(), "float32")


def test_rows_that_keep_nothing_give_the_same_bits_alone_and_together() -> None:
    paged = Paged()
    for rid in (1, 2):
        paged.add(rid, 30)
    paged.step({1: 13, 2: 5})
    together = paged.peek({1: 7, 2: 20})
    assert torch.equal(together[0], paged.peek({1: 7})[0])
    assert torch.equal(together[1], paged.peek({2: 20})[0])


@pytest.mark.parametrize(("length", "to_compute"), [(-1, 2), (3, 0)])
def test_a_row_that_keeps_nothing_reads_none_or_more_and_computes_some(length: int, to_compute: int) -> None:
    row = StepRow("r", "main", [1] if length > 0 else [], length, to_compute)
    with pytest.raises(IntegrityError, match=f"computes {to_compute} of {length} slots"):
        Paged().attention.begin(StepTables(PAGE, (row,), commit=False))


@pytest.mark.parametrize("spans", [{1: 70, 2: 9, 3: 1}, {1: 1, 2: 1, 3: 1}, {1: 1, 2: 70, 3: 1}])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(spans: dict[int, int]) -> None:
    together, alone = Paged(), Paged()
    for rid, tokens in spans.items():
        together.add(rid, 8 + tokens)
        alone.add(rid, 8 + tokens)
    together.step(dict.fromkeys(spans, 8))
    outs = together.step(spans)
    for (rid, span), out in zip(spans.items(), outs, strict=True):
        alone.step({rid: 8})
        assert torch.equal(alone.step({rid: span})[0], out)


def test_where_the_pages_lie_changes_no_bit() -> None:
    scattered, in_a_row = Paged(), Paged()
    scattered.add(1, 41)
    in_a_row.add(1, 41, pages=list(range(20, 31)))
    for span in (30, 10, 1):
        assert torch.equal(scattered.step({1: span})[0], in_a_row.step({1: span})[0])


def test_two_rows_read_the_same_shared_pages() -> None:
    paged = Paged()
    paged.add(1, 8)
    paged.step({1: 8})
    paged.add(2, 10)
    for mine, theirs in zip(paged.streams[2], paged.streams[1], strict=True):
        mine[:8] = theirs
    paged.pages[2] = [*paged.pages[1], paged.pages[2][2]]
    paged.done[2] = 8
    assert_near(paged.step({2: 2})[0], paged.expected(2, 8, 10), "float32")


def test_layers_do_not_see_each_other() -> None:
    paged = Paged()
    paged.add(1, 12)
    before = paged.store.pages[0].clone()
    paged.step({1: 12}, layer=1)
    assert torch.equal(paged.store.pages[0], before)


def test_pages_of_another_dtype_are_read_in_the_compute_dtype() -> None:
    paged = Paged("bfloat16", "float32")
    paged.add(1, 12)
    out = paged.step({1: 12})[0]
    assert out.dtype == torch.float32
    assert_near(out, paged.expected(1, 0, 12), "bfloat16")


def test_scale_multiplies_the_scores() -> None:
    paged = Paged()
    paged.add(1, 5)
    paged.attention = TorchPagedAttention(paged.store, num_heads=HEADS, scale=0.0)
    mean = paged.streams[1][2].mean(0).repeat_interleave(HEADS // KV_HEADS, 0)
    torch.testing.assert_close(paged.step({1: 5}, causal=False)[0], mean.expand(5, -1, -1))


@pytest.mark.parametrize(
    ("pages", "length", "to_compute", "message"),
    [
        ([1, 120], 8, 8, "1..120 reach outside a pool of 120"),
        ([-1, 3], 8, 1, "-1..3"),
        ([1], 5, 1, "lists 1 pages of 4 slots for 5 slots"),
        ([1, 2, 3], 8, 1, "lists 3 pages"),
        ([1], 3, 4, "computes 4 of 3 slots"),
        ([1], 3, 0, "computes 0 of 3"),
    ],
)
def test_a_table_that_does_not_fit_the_store_is_refused(pages: list[int], length: int, to_compute: int, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        Paged().attention.begin(StepTables(PAGE, (StepRow("r", "main", pages, length, to_compute),)))


def test_tables_of_another_page_size_are_refused() -> None:
    with pytest.raises(IntegrityError, match="8 slots a page and the store at 4"):
        Paged().attention.begin(StepTables(8, (StepRow("r", "main", [1], 3, 3),)))


def test_attention_before_begin_is_refused() -> None:
    paged = Paged()
    with pytest.raises(IntegrityError, match="before begin"):
        paged.attention.attend(0, torch.zeros(1, HEADS, HEAD_DIM))


def test_a_write_of_other_tokens_than_the_step_has_is_refused() -> None:
    paged = Paged()
    paged.attention.begin(StepTables(PAGE, (StepRow("r", "main", [1], 3, 3),)))
    with pytest.raises(IntegrityError, match="writes 2 tokens in a step of 3"):
        paged.attention.write(0, torch.zeros(2, KV_HEADS, HEAD_DIM), torch.zeros(2, KV_HEADS, HEAD_DIM))


@pytest.mark.parametrize("num_heads", [0, 3, 5])
def test_heads_that_do_not_share_kv_heads_evenly_are_refused(num_heads: int) -> None:
    with pytest.raises(InputError, match=f"{num_heads} query heads"):
        TorchPagedAttention(Paged().store, num_heads=num_heads)
