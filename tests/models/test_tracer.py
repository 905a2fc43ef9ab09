"""TracerModel: the oracle itself must notice everything it is there to notice."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from kvlab.attention.store import KVStore
from kvlab.errors import InputError, IntegrityError
from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel
from kvlab.spec import Chat, Continued, RowInputs, StepRow, StepTables

PAGE = 4
IDS = [5, 9, 2, 77, 31, 8, 8, 40, 3, 12]
PAGES = [6, 2, 9, 4]


class Tracer:
    """A tracer over ten pages, one stream at a time."""

    def __init__(self, seed: int = 0) -> None:
        self.model = TracerModel(seed=seed)
        self.store = KVStore(self.model.kv_layout(PAGE), 10)
        self.attention = TracerAttention(self.store)

    def run(
        self, ids: Sequence[int], done: int = 0, pages: Sequence[int] = PAGES, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        length = done + len(ids)
        row = StepRow(1, "main", pages[: -(-length // PAGE)], length, len(ids))
        self.attention.begin(StepTables(PAGE, (row,)))
        where = positions or range(done, length)
        (logits,) = self.model.forward("prefill", [RowInputs(ids, where, 0)], self.attention)
        assert logits is not None
        return logits


def test_greedy_decoding_over_pages_is_the_continuation() -> None:
    tracer = Tracer()
    tokens = [int(tracer.run(IDS)[-1].argmax())]
    for count in range(5):
        tokens.append(int(tracer.run(tokens[-1:], len(IDS) + count)[-1].argmax()))
    assert tokens == tracer.model.continuation(IDS, 6)
    tracer.model.check_pages(tracer.store, PAGES, [*IDS, *tokens[:-1]])


@pytest.mark.parametrize("split", range(1, 10))
def test_chunks_write_the_digests_and_logits_of_one_pass(split: int) -> None:
    whole, chunked = Tracer(), Tracer()
    parts = [chunked.run(IDS[:split]), chunked.run(IDS[split:], split)]
    assert torch.equal(torch.cat(parts), whole.run(IDS))
    chunked.model.check_pages(chunked.store, PAGES, IDS)


@pytest.mark.parametrize("slot", range(8))
@pytest.mark.parametrize("which", ["keys", "values"])
def test_one_wrong_slot_anywhere_before_changes_the_logits(slot: int, which: str) -> None:
    good, bad = Tracer(), Tracer()
    for tracer in (good, bad):
        tracer.run(IDS[:8])
    getattr(bad.store, which)(0)[PAGES[slot // PAGE], slot % PAGE] += 1
    assert not torch.equal(bad.run(IDS[8:], 8), good.run(IDS[8:], 8))


def test_a_page_of_another_prefix_spoils_every_digest_after_it() -> None:
    tracer = Tracer()
    tracer.run([1, 2, 3, 4], pages=[6])
    tracer.run(IDS[4:], 4)
    expected = tracer.model.digests(IDS)
    stored = tracer.store.read(0, tracer.store.selector(PAGES[1:3]), 6)[0].flatten().tolist()
    assert not set(stored) & set(expected)


def test_equal_tokens_at_other_positions_have_other_digests() -> None:
    tracer = Tracer()
    tracer.run(IDS, positions=range(1, 11))
    with pytest.raises(IntegrityError):
        tracer.model.check_pages(tracer.store, PAGES, IDS)
    tracer.model.check_pages(tracer.store, PAGES, IDS, positions=range(1, 11))


def test_a_wrong_page_is_named_by_its_first_wrong_slot() -> None:
    tracer = Tracer()
    tracer.run(IDS)
    tracer.store.keys(0)[2, 1] = 0
    with pytest.raises(IntegrityError, match=re.escape("slot 5 (page 2, offset 1) holds digest 0 of token 8")):
        tracer.model.check_pages(tracer.store, PAGES, IDS)


def test_a_block_that_is_not_causal_sees_all_of_itself() -> None:
    tracer = Tracer()
    row = StepRow(1, "main", PAGES[:2], 6, 6)
    tracer.attention.begin(StepTables(PAGE, (row,), causal=False))
    (logits,) = tracer.model.forward("image", [RowInputs(IDS[:6], [0] * 6, 0)], tracer.attention)
    assert logits is not None
    assert torch.equal(logits, logits[-1:].expand_as(logits))


def test_rows_do_not_touch_each_other() -> None:
    together, alone = Tracer(), Tracer()
    tables = StepTables(PAGE, (StepRow(1, "main", [1, 2], 6, 6), StepRow(2, "main", [3], 3, 3)))
    together.attention.begin(tables)
    rows = [RowInputs(IDS[:6], range(6), 5), RowInputs(IDS[6:9], range(3), None)]
    first, second = together.model.forward("prefill", rows, together.attention)
    assert first is not None
    assert second is None
    assert torch.equal(first, alone.run(IDS[:6])[-1:])
    together.model.check_pages(together.store, [3], IDS[6:9])


def test_another_seed_is_another_model() -> None:
    assert Tracer(1).model.continuation(IDS, 8) != Tracer(2).model.continuation(IDS, 8)
    assert Tracer(1).model.weights_version() != Tracer(2).model.weights_version()


def test_the_continuation_ends_with_a_stop_id() -> None:
    free = TracerModel().continuation(IDS, 8)
    stopped = TracerModel(ToyProcessor(stop_ids=[free[3]])).continuation(IDS, 8)
    assert stopped == free[: free.index(free[3]) + 1]


def test_the_tracer_names_no_checkpoint_unless_told() -> None:
    assert TracerModel().checkpoint_path() is None
    assert TracerModel(checkpoint_path="somewhere").checkpoint_path() == "somewhere"


def test_pages_of_floats_are_refused() -> None:
    with pytest.raises(InputError, match="int64, not float32"):
        TracerModel().kv_layout(PAGE, "float32")


# -- the toy processor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("3 1  4", [3, 1, 4]),
        ((3, 1, 4), [3, 1, 4]),
        (Continued((3, 1), "4 1"), [3, 1, 4, 1]),
        (Chat((("user", "3"), ("assistant", "1"), ("user", "4 1"))), [3, 1, 4, 1]),
        (Chat((("user", "3"), ("assistant", "1"), ("user", "4 1")), kept_ids=(9, 9), kept_messages=2), [9, 9, 4, 1]),
    ],
)
def test_every_kind_of_prompt_becomes_ids(prompt: object, ids: list[int]) -> None:
    assert ToyProcessor().process_prompt(prompt, {}).tensors["tokens"] == ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 64], "64 at position 1 .* vocabulary of 64"),
        ([-1], "-1 at position 0"),
        ([True], "True at position 0"),
        ([1.0], "1.0 at position 0"),
        ("1 x", "'x' at position 1"),
        (None, "got NoneType"),
        (b"1", "got bytes"),
        ({1: 2}, "got dict"),
        (Chat(({"role": "user", "content": "1"},)), "message 0"),  # type: ignore[arg-type]
        ("", "empty"),
        ([], "empty"),
    ],
)
def test_a_prompt_that_is_no_ids_is_refused_by_value_and_place(prompt: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ToyProcessor(64).process_prompt(prompt, {})


def test_the_record_shows_which_fields_reached_the_processor() -> None:
    assert ToyProcessor().process_prompt([1], {"voice": "tara"}).metadata == {"voice": "tara"}
