import os
from dataclasses import replace

import pytest

from kvlab.cache.keys import chain_ids, cut_layout
from kvlab.engine.keyer import PromptKeyer
from kvlab.engine.preprocess import MODES, PreprocessWorker
from kvlab.errors import InputError, KvlabError
from kvlab.spec import RESERVED_FIELDS, PrefixStream, PromptRecord, Span

TEXT = PrefixStream("tokens", "ids", "prefill", "decode")
STREAMS = {"kv": {"main": TEXT}}
PAGE = 16


class Letters:
    """One id a letter; tells in its metadata which fields it was given. Picklable: lives at module level."""

    stop_ids = (0,)
    vocab_size = 1 << 16

    def process_prompt(self, prompt, fields):
        if prompt == "die":
            os._exit(3)
        if prompt == "odd error":
            raise OddError(1, 2)
        if not prompt:
            raise InputError("the prompt is empty; give text")
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        return PromptRecord({"tokens": ids}, metadata={"fields": dict(fields)}, text=str(prompt))

    def decode(self, ids):
        return "".join(map(chr, ids))


class OddError(Exception):
    """Cannot be unpickled: its constructor wants other arguments than it keeps."""

    def __init__(self, a, b):
        super().__init__("odd")


class Laid(Letters):
    """Gives every prompt the layout it was made with."""

    def __init__(self, *spans):
        self.spans = spans

    def process_prompt(self, prompt, fields):
        record = super().process_prompt(prompt, fields)
        return replace(record, layouts={"kv": {"main": self.spans}})


@pytest.fixture(params=MODES)
def worker(request):
    with PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode=request.param) as w:
        yield w


@pytest.fixture
def keyer():
    return PromptKeyer(Letters(), STREAMS, {"kv": PAGE}, memo_bytes=1 << 20)


def keyed(prepared, resource="kv", label="main"):
    return prepared.configs[resource][label]


# -- the same in every mode


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40])
def test_keys_are_the_same_bytes_in_every_mode_and_for_every_length(worker, length):
    ids = list(range(100, 100 + length))
    for _ in range(2):  # the second time from the memo
        out = keyed(worker.prepare(ids))
        assert out.keys == chain_ids(ids, PAGE)
        assert len(out.keys) == -(-length // PAGE)
        assert (list(out.ids), list(out.tail), out.prompt_slots) == (ids, ids[length // PAGE * PAGE :], length)
        assert out.decode_tensor == "tokens"


def test_b10_client_keys_never_reach_the_processor(worker):
    forged = {name: {"kv": {"main": [b"x" * 32]}} for name in RESERVED_FIELDS}
    prepared = worker.prepare("hello", {**forged, "voice": "tara"})
    assert prepared.record.metadata["fields"] == {"voice": "tara"}
    assert keyed(prepared).keys == chain_ids([ord(c) for c in "hello"], PAGE)


def test_an_input_error_arrives_as_itself_and_the_worker_goes_on(worker):
    with pytest.raises(InputError, match="the prompt is empty; give text"):
        worker.prepare("")
    with pytest.raises(InputError, match="position 1"):
        worker.prepare([5, -1])
    assert keyed(worker.prepare("a")).prompt_slots == 1


def test_submitted_prompts_come_back_in_their_own_futures(worker):
    futures = [worker.submit("x" * n) for n in (3, 20, 50)]
    assert [keyed(f.result()).prompt_slots for f in futures] == [3, 20, 50]


def test_remembered_keys_serve_the_follow_up(worker):
    ids = list(range(64))
    worker.remember("kv", ids, chain_ids(ids, PAGE))
    before = worker.num_memo_bytes()
    assert before > 0
    assert keyed(worker.prepare([*ids, 1, 2, 3])).keys == chain_ids([*ids, 1, 2, 3], PAGE)


def test_a_closed_worker_says_so(worker):
    worker.prepare("a")
    worker.close()
    worker.close()
    with pytest.raises(KvlabError, match="closed"):
        worker.submit("a")


def test_fields_given_to_submit_may_be_changed_afterwards():
    with PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode="thread") as worker:
        fields = {"voice": "tara"}
        first, second = worker.submit("x" * 5000, fields), worker.submit("b", fields)
        fields["voice"] = "leo"
        assert [f.result().record.metadata["fields"]["voice"] for f in (first, second)] == ["tara", "tara"]


# -- the process


def test_a_dead_process_fails_its_request_and_the_next_one_starts_another():
    with PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode="process") as worker:
        with pytest.raises(KvlabError, match=r"ended \(exit code 3\)"):
            worker.prepare("die")
        assert keyed(worker.prepare("alive")).prompt_slots == 5


def test_an_error_that_cannot_travel_arrives_by_its_name():
    with PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode="process") as worker:
        with pytest.raises(KvlabError, match="OddError: odd"):
            worker.prepare("odd error")
        with pytest.raises(InputError, match="the prompt cannot travel"):
            worker.prepare(lambda: "not picklable")


def test_a_processor_that_cannot_travel_is_refused_at_once():
    processor = Letters()
    processor.hook = lambda: None
    with pytest.raises(InputError, match="the prompt processor cannot travel"):
        PreprocessWorker(processor, STREAMS, {"kv": PAGE}, mode="process")


def test_closing_ends_the_process():
    worker = PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode="process")
    worker.prepare("a")
    process = worker._keyer._process
    worker.close()
    assert process.exitcode == 0


# -- what is keyed, and at which size


def test_b22_pages_are_cut_at_the_size_the_engine_uses(keyer):
    ids = list(range(40))
    other = PromptKeyer(Letters(), STREAMS, {"kv": 8}, memo_bytes=0)
    assert keyed(other.prepare(ids, {})).keys == chain_ids(ids, 8)
    assert keyed(keyer.prepare(ids, {})).keys == chain_ids(ids, 16)


def test_b22_a_resource_without_a_page_size_is_refused():
    with pytest.raises(InputError, match="no page size given for kv"):
        PromptKeyer(Letters(), STREAMS, {}, memo_bytes=0)


def test_streams_not_keyed_by_ids_or_without_their_tensor_are_left_out():
    streams = {"kv": {"main": TEXT, "odd": replace(TEXT, keyed_by="embedding"), "absent": replace(TEXT, tensor="other")}}
    keyer = PromptKeyer(Letters(), streams, {"kv": PAGE}, memo_bytes=0)
    assert set(keyer.prepare("hello", {}).configs["kv"]) == {"main"}


def test_a_stream_without_a_decode_walk_names_no_decode_tensor():
    streams = {"kv": {"main": replace(TEXT, decode_walk=None)}}
    assert keyed(PromptKeyer(Letters(), streams, {"kv": PAGE}, memo_bytes=0).prepare("hello", {})).decode_tensor is None


def test_each_resource_gets_its_own_part_at_its_own_size():
    keyer = PromptKeyer(Letters(), {"a": {"main": TEXT}, "b": {"main": TEXT}}, {"a": 4, "b": 8}, memo_bytes=1 << 16)
    prepared = keyer.prepare(list(range(20)), {})
    assert (len(keyed(prepared, "a").keys), len(keyed(prepared, "b").keys)) == (5, 3)


def test_unknown_mode_is_refused():
    with pytest.raises(InputError, match="'fork'; it must be one of inline, thread, process"):
        PreprocessWorker(Letters(), STREAMS, {"kv": PAGE}, mode="fork")


# -- layouts


def test_a_layout_is_keyed_by_its_one_reading():
    spans = (Span("ids", "text", 20, 20), Span("digest", "vit", 30, 1, b"d" * 32), Span("ids", "text", 25, 25))
    ids = list(range(45))
    keyer = PromptKeyer(Laid(*spans), STREAMS, {"kv": PAGE}, memo_bytes=0)
    out = keyed(keyer.prepare(ids, {}))
    cut = cut_layout(spans, ids, PAGE)
    assert [len(page) for page in cut.ids] == [16, 4, 0, 14, 11]
    assert (out.keys, out.prompt_slots, out.layout) == (cut.keys(), 75, spans)
    assert (list(out.tail), out.tail_items) == (ids[-11:], ())


def test_a_picture_on_the_last_partial_page_is_shipped_with_the_tail():
    spans = (Span("ids", "text", 20, 20), Span("digest", "vit", 4, 1, b"d" * 32))
    out = keyed(PromptKeyer(Laid(*spans), STREAMS, {"kv": PAGE}, memo_bytes=0).prepare(list(range(20)), {}))
    assert (list(out.tail), [(i.start, i.offset, i.length) for i in out.tail_items]) == ([16, 17, 18, 19], [(4, 0, 4)])


def test_a_layout_that_ends_on_a_boundary_has_no_tail():
    spans = (Span("ids", "text", 12, 12), Span("digest", "vit", 4, 1, b"d" * 32))
    out = keyed(PromptKeyer(Laid(*spans), STREAMS, {"kv": PAGE}, memo_bytes=0).prepare(list(range(12)), {}))
    assert (list(out.tail), out.tail_items, len(out.keys)) == ([], (), 1)


def test_a_medium_without_a_digest_leaves_the_stream_unkeyed():
    spans = (Span("ids", "text", 12, 12), Span("digest", "vit", 4, 1, None))
    assert PromptKeyer(Laid(*spans), STREAMS, {"kv": PAGE}, memo_bytes=0).prepare(list(range(12)), {}).configs == {"kv": {}}
