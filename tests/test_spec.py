"""The small functions that rooms share."""

from __future__ import annotations

import pytest

from kvlab import seams, spec, step, streams
from kvlab.errors import InputError
from kvlab.spec import Chat, KVLayout, Match, PrefixStream, WalkInputs, drop_leading, last_page_length


@pytest.mark.parametrize(("length", "right"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 1), (8, 4)])
def test_k3_3_tokens_in_the_last_page(length, right):
    assert last_page_length(length, page_size=4) == right


def test_the_default_cut_trims_each_label_by_its_own_match():
    inputs = WalkInputs({"main": [1, 2, 3, 4], "cfg_img": [1, 2, 3, 4], "cfg_text": [5]})
    cut = drop_leading(inputs, {"main": Match(2, 2), "cfg_img": Match(3, 3)})
    assert cut.ids == {"main": [3, 4], "cfg_img": [4], "cfg_text": [5]}


@pytest.mark.parametrize(
    ("layers", "heads", "mebibytes"),
    [(28, 4, 7), (28, 8, 14)],  # BAGEL 7B and Orpheus 3B at 128 slots a page in bfloat16
)
def test_bytes_per_page_of_the_published_models(layers, heads, mebibytes):
    layout = KVLayout(layers, heads, 128, page_size=128, dtype="bfloat16")
    assert layout.bytes_per_page(2) == mebibytes << 20


def test_a_stream_names_every_walk_that_may_write_it():
    stream = PrefixStream("text_inputs", walk="prefill_text", decode_walk="decode", layout_walks=("prefill_vit", "prefill_vae"))
    assert stream.walks() == {"prefill_text", "decode", "prefill_vit", "prefill_vae"}
    assert PrefixStream("tokens").walks() == {"prefill"}


@pytest.mark.parametrize(("inputs", "opaque"), [({}, False), ({"step_info": True}, True), ({"tensors": {"pixels": 1}}, True)])
def test_what_is_not_ids_is_opaque(inputs, opaque):
    assert WalkInputs({"main": [1]}, **inputs).opaque is opaque


def test_the_spec_offers_whatever_its_three_modules_declare():
    assert [name for name in spec.__all__ if not hasattr(spec, name)] == []
    for module in (streams, step, seams):
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert own
        assert {name: getattr(spec, name, None) for name in own} == own
        assert own.keys() <= set(spec.__all__)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((None,), "messages of a chat is None"),
        (("hi",), "messages of a chat is 'hi'"),
        (((), None), "kept_ids of a chat is None"),
        (((), (), "x"), "kept_messages of a chat is 'x'"),
        (((), (), True), "kept_messages of a chat is True"),
    ],
)
def test_a_chat_of_the_wrong_kind_is_refused_where_it_is_made(parts, message):
    with pytest.raises(InputError, match=message):
        Chat(*parts)
