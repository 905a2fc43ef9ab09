"""Frames and ids, streams that are damaged, and prompts: what Orpheus reads and writes, without its weights."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_orpheus import make_tokenizer

from kvlab.errors import InputError, LoadError
from kvlab.models.orpheus.prompts import OrpheusProcessor
from kvlab.models.orpheus.tokens import (
    BadFrame,
    Frame,
    FrameReader,
    OnlySpeech,
    OrpheusIds,
    check_frames,
    frames_of,
    from_levels,
    ids_of,
    to_levels,
)
from kvlab.spec import Continued, chat

IDS = OrpheusIds()
FRAMES = st.lists(st.tuples(*[st.integers(0, 4095)] * 7), max_size=12)


def some_frames(count: int, seed: int = 0) -> list[Frame]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(4096) for _ in range(7)) for _ in range(count)]


def read(tokens: list[int], *, repeat_bad: bool = False) -> tuple[list[Frame], FrameReader]:
    reader = FrameReader(IDS, repeat_bad)
    return [frame for token in tokens for frame in reader.push(token)], reader


# -- frames and codes --------------------------------------------------------------------------------------------------


def test_audio_ids_are_the_released_ones():
    assert (IDS.audio.start, IDS.audio.stop - 1, IDS.start_of_speech, IDS.end_of_speech) == (128266, 156937, 128257, 128258)
    assert IDS.slot_ids(6) == range(128266 + 6 * 4096, 156938)


@given(FRAMES)
def test_frames_survive_ids_and_levels(frames):
    assert frames_of(ids_of(frames, IDS), IDS) == frames
    assert from_levels(to_levels(frames)) == frames


@given(FRAMES)
def test_a_stream_of_whole_frames_is_read_as_it_is(frames):
    found, reader = read(ids_of(frames, IDS))
    assert (found, reader.bad, reader.num_ignored, reader.num_left_over) == (frames, [], 0, 0)


def test_k17_5_de_interleave_and_its_inverse():
    levels = to_levels([range(7), range(7, 14)])
    assert levels == ([0, 7], [1, 4, 8, 11], [2, 3, 5, 6, 9, 10, 12, 13])
    assert [code for frame in from_levels(levels) for code in frame] == list(range(14))


def test_k17_3_code_0_is_a_code():
    frames = some_frames(10)
    frames[4] = (0, *frames[4][1:])
    assert read(ids_of(frames, IDS))[0] == frames


@pytest.mark.parametrize("slot", range(7))
def test_code_0_is_a_code_in_every_slot(slot):
    frames = some_frames(3)
    frames[1] = tuple(0 if i == slot else code for i, code in enumerate(frames[1]))
    assert read(ids_of(frames, IDS))[0] == frames


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ((1, 2, 3), "frame 0 has 3 codes; a frame has 7"),
        ((0, 1, 2, 3, 4, 5, 6.0), "frame 0, slot 6: the code is 6.0"),
        ((0, 1, 2, 3, 4, 5, 4096), "frame 0, slot 6: the code is 4096; codes are ints from 0 to 4095"),
        ((0, 1, 2, -1, 4, 5, 6), "frame 0, slot 3: the code is -1"),
        ((True, 1, 2, 3, 4, 5, 6), "frame 0, slot 0: the code is True"),
    ],
)
def test_codes_that_are_none_are_named(frame, message):
    with pytest.raises(InputError, match=message):
        check_frames([frame], 4096)


def test_ids_that_are_no_whole_frames_are_refused():
    tokens = ids_of(some_frames(2), IDS)
    with pytest.raises(InputError, match="tokens 7 to 12 are not the 7 slots of a frame"):
        frames_of(tokens[:-1], IDS)
    with pytest.raises(InputError, match="tokens 0 to 6"):
        frames_of(tokens[1:], IDS)


def test_levels_that_are_no_whole_frames_are_refused():
    with pytest.raises(InputError, match=r"the levels have \[2, 4, 7\] codes"):
        from_levels(([0] * 2, [0] * 4, [0] * 7))


# -- damaged streams ---------------------------------------------------------------------------------------------------


def damaged(kind: str, place: int, tokens: list[int]) -> list[int]:
    wrong_slot = IDS.audio_id((place % 7 + 3) % 7, 99)
    match kind:
        case "lost":
            return [*tokens[:place], *tokens[place + 1 :]]
        case "control instead":
            return [*tokens[:place], IDS.end_of_ai, *tokens[place + 1 :]]
        case "out of range instead":
            return [*tokens[:place], IDS.audio.stop, *tokens[place + 1 :]]
        case "wrong slot instead":
            return [*tokens[:place], wrong_slot, *tokens[place + 1 :]]
        case "early end":
            frame_end = (place // 7 + 1) * 7
            return [*tokens[:place], IDS.end_of_speech, *tokens[frame_end:]]
        case "wrong slot more":
            return [*tokens[:place], wrong_slot, *tokens[place:]]
    raise AssertionError(kind)


KINDS = ["lost", "control instead", "out of range instead", "wrong slot instead", "early end", "wrong slot more"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", range(21, 28))
def test_one_bad_token_costs_one_frame_and_shifts_nothing(kind, place):
    frames = some_frames(8)
    found, reader = read(damaged(kind, place, ids_of(frames, IDS)))
    lost = frames.index(next(f for f in frames if f not in found)) if len(found) < 8 else None
    if kind == "early end" and place == 21:  # between two frames
        assert lost == 3
        assert reader.bad == []
        return
    if kind == "wrong slot more" and place == 21:  # a token too many between two frames is taken for a frame of its own
        assert found in (frames, [*frames[:3], *frames[4:]])
    else:
        assert found == [*frames[:3], *frames[4:]]
        assert lost == 3
    assert [bad.index for bad in reader.bad] == [3]


@pytest.mark.parametrize("place", range(22, 28))
@pytest.mark.parametrize("kind", ["lost", "control instead", "wrong slot instead"])
def test_a_bad_frame_can_be_filled_with_the_one_before(kind, place):
    frames = some_frames(8)
    found, reader = read(damaged(kind, place, ids_of(frames, IDS)), repeat_bad=True)
    assert found == [*frames[:3], frames[2], *frames[4:]]
    assert len(reader.bad) == 1


@given(st.integers(0, 55), st.integers(128266, 156937))
def test_any_token_instead_of_another_costs_at_most_that_frame(place, token):
    frames = some_frames(8)
    tokens = ids_of(frames, IDS)
    tokens[place] = token
    found, _ = read(tokens)
    hurt = place // 7
    assert [f for f in found if f in frames] == [f for i, f in enumerate(frames) if i != hurt or f in found]
    assert len(found) <= 8


def test_control_tokens_between_audio_tokens_cost_nothing():
    tokens = ids_of(some_frames(3), IDS)
    sprinkled = [x for token in tokens for x in (IDS.start_of_ai, token)]
    found, reader = read(sprinkled)
    assert (found, reader.bad, reader.num_ignored) == (some_frames(3), [], 21)


def test_two_bad_frames_in_a_row_are_both_named():
    frames = some_frames(5)
    tokens = ids_of(frames, IDS)
    tokens[9], tokens[16] = IDS.audio.stop, IDS.audio.stop
    found, reader = read(tokens)
    assert found == [frames[0], *frames[3:]]
    assert reader.bad == [BadFrame(1, "slot 3 came where slot 2 belongs"), BadFrame(2, "slot 3 came where slot 2 belongs")]


@pytest.mark.parametrize(("tokens", "left_over"), [(5, 5), (7, 0), (27, 6), (28, 0), (35, 0)])
def test_tokens_of_a_frame_that_is_not_whole_are_counted(tokens, left_over):
    found, reader = read(ids_of(some_frames(5), IDS)[:tokens])
    assert (len(found), reader.num_left_over) == (tokens // 7, left_over)


# -- only legal tokens -------------------------------------------------------------------------------------------------


def test_only_the_slot_that_is_due_may_come_and_the_end_between_frames():
    only, tokens = OnlySpeech(IDS), ids_of(some_frames(3), IDS)
    for count in range(15):
        ranges = only(tokens[:count])
        assert ranges[0] == IDS.slot_ids(count % 7)
        assert (range(IDS.end_of_speech, IDS.end_of_speech + 1) in ranges) == (count % 7 == 0)


def test_a_continuation_goes_on_inside_a_frame():
    assert OnlySpeech(IDS, slot=5)([]) == (IDS.slot_ids(5),)
    assert OnlySpeech(IDS, slot=5)([IDS.audio_id(5, 0)]) == (IDS.slot_ids(6),)


def test_after_an_end_that_is_ignored_a_frame_begins():
    assert OnlySpeech(IDS)([IDS.end_of_speech])[0] == IDS.slot_ids(0)


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor() -> OrpheusProcessor:
    return OrpheusProcessor(make_tokenizer(), ids=IDS, vocab_size=156940)


def ids(processor: OrpheusProcessor, prompt: object, **fields: object) -> list[int]:
    return list(processor.process_prompt(prompt, fields).tensors["tokens"])


RENDERED = "<custom_token_3>{}tara: Hi.<|eot_id|><custom_token_4><custom_token_5><custom_token_1>"


@pytest.mark.parametrize(
    "text",
    [
        "Hi.",
        "<|begin_of_text|>Hi.",
        RENDERED.format("<|begin_of_text|>"),
        RENDERED.format(""),
        RENDERED.format("<|begin_of_text|><|begin_of_text|>"),
        "<|begin_of_text|>" + RENDERED.format("<|begin_of_text|>"),
    ],
)
def test_k15_3_one_begin_token_whichever_way_text_comes_in(processor, text):
    found = ids(processor, text)
    assert found.count(128000) == 1
    assert found == ids(processor, "Hi.", voice="tara")


def test_a_prompt_of_the_other_released_format_is_taken_as_it_is(processor):
    found = ids(processor, "<custom_token_3>Hi.[leo]<custom_token_4><custom_token_5>")
    assert found == [128259, 128000, *map(ord, "Hi.[leo]"), 128260, 128261]


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "text to speak is empty"),
        (" \n", {}, "text to speak is empty"),
        ("Hi", {"voice": "tom"}, "no voice 'tom'; there are: tara, leah, jess, leo, dan, mia, zac, zoe, or None"),
        ("Hi", {"voice": 3}, "no voice 3"),
        ("Hi", {"speed": 2}, "knows no field 'speed'; it knows 'voice'"),
        (RENDERED, {"voice": "leo"}, "the text is a whole prompt already, so its voice is in it"),
        ([128259, 5], {"voice": "leo"}, "ids are a whole prompt already, so its voice is in it; leave out the field voice"),
        (Continued((128259, 5), ""), {"voice": "leo"}, "goes on with an utterance, so its voice is in it; leave out the field"),
        (Continued((128259, 5), RENDERED), {"voice": "leo"}, "its voice is in it"),
        ("Hi <custom_token_2> there", {}, "holds the control token '<custom_token_2>'"),
        ("Hi <custom_token_10>", {}, "holds the control token '<custom_token_10>'"),
        (chat("Hi"), {}, "holds no conversation"),
        (Continued((128259, 5), 3), {}, "the text of a continuation is 3"),
        (Continued((), ""), {}, "the kept is empty"),
        ([], {}, "the prompt is empty"),
        ("\ud800", {}, "lone surrogate"),
    ],
)
def test_bad_prompts_are_named(processor, prompt, fields, message):
    with pytest.raises(InputError, match=message):
        processor.process_prompt(prompt, fields)


def test_going_on_keeps_every_id_and_adds_none(processor):
    kept = (*ids(processor, "Hi."), *ids_of(some_frames(2), IDS))
    assert ids(processor, Continued(kept, "")) == list(kept)


def test_the_next_utterance_follows_the_end_of_the_last(processor):
    kept = (*ids(processor, "Hi."), *ids_of(some_frames(2), IDS))
    found = ids(processor, Continued(kept, "Bye."), voice="leo")
    assert found == [*kept, IDS.end_of_speech, IDS.end_of_ai, *ids(processor, "Bye.", voice="leo")]


def test_audio_and_control_ids_have_no_text(processor):
    assert processor.decode([128259, 128000, 72, 105, 128009, *ids_of(some_frames(1), IDS), 128258]) == "Hi"
    assert processor.stop_ids == (128258,)


def test_a_config_with_ids_that_are_none_is_refused():
    with pytest.raises(LoadError, match="codebook_size is 0"):
        OrpheusIds.from_config({"codebook_size": 0, "voices": []})
    assert OrpheusIds.from_config({"custom_token_base": 256, "codebook_size": 512}).audio == range(266, 3850)
