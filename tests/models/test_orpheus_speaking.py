"""Orpheus through the engine: loading, speaking in chunks, several voices at once, and what a hit keeps equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_orpheus
import torch
from tiny_checkpoints import write_folder as write_text_folder

import kvlab
from kvlab.assemble import build_engine
from kvlab.errors import InputError, LoadError, MissingExtraError
from kvlab.models.loading import load_model
from kvlab.models.orpheus.loading import CODEC, load_orpheus
from kvlab.models.orpheus.noise import SeededNoise
from kvlab.models.orpheus.official import prompt_string
from kvlab.models.orpheus.spec import OrpheusModel
from kvlab.models.orpheus.stream import collect, say, speak, together
from kvlab.models.orpheus.tokens import frames_of

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("snac")

FRAME = 2048
SPEECH = {"only_speech": True, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_orpheus.write_folder(tmp_path_factory.mktemp("orpheus") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> OrpheusModel:
    return load_orpheus(folder, device="cpu")


@pytest.fixture
def make(model: Any, engine_over: Any) -> Callable[..., Any]:
    return lambda **settings: engine_over(model, **({"num_pages": 96, "page_size": 8} | settings))


# -- loading -----------------------------------------------------------------------------------------------------------


def test_load_recognises_an_orpheus_folder(folder):
    with kvlab.load(folder, num_pages=64, device="cpu") as engine:
        assert isinstance(engine.model, OrpheusModel)
        assert engine.model.voices == ("tara", "leo", "zoe")
        assert "codec sha256:" in engine.model.identity


def test_a_released_folder_is_told_by_its_vocabulary(tmp_path):
    model = load_model(tiny_orpheus.write_folder(tmp_path / "r", released=True, shard_size="1MB"), device="cpu")
    assert len(list((tmp_path / "r").glob("*.safetensors"))) > 1
    assert isinstance(model, OrpheusModel)
    assert (model.ids.first_audio, model.voices[0], len(model.voices)) == (128266, "tara", 8)


def test_a_text_model_stays_one(tmp_path):
    write_text_folder(tmp_path / "text")
    with kvlab.load(tmp_path / "text", num_pages=32, device="cpu") as engine:
        assert not isinstance(engine.model, OrpheusModel)
        with pytest.raises(InputError, match="text does not speak; load an Orpheus model"):
            speak(engine, "Hi")


def test_the_codec_is_found_by_its_name_among_the_model_folders(tmp_path, monkeypatch, own_cache):
    speech = tiny_orpheus.write_folder(tmp_path / "speech", with_codec=False)
    tiny_orpheus.write_codec(tmp_path / "models" / CODEC)
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "models"))
    assert load_model(speech, device="cpu").codec.codebook_size == 4096
    assert load_orpheus(speech, codec=tmp_path / "models" / CODEC, device="cpu").codec.codebook_size == 4096


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"codebook_size": 512}, "writes codes of a book of 512 and the codec has a book of 4096; load the codec"),
        ({"custom_token_base": 400}, "has 28872 ids and audio up to id 29081"),
        ({"sample_rate": 16000}, "says sample_rate 16000 and the codec in .* has 24000"),
        ({"samples_per_frame": 1024}, "says samples_per_frame 1024"),
        ({"voices": "tara"}, "voices are 'tara'; a list of names"),
        ({"codec": "../snac"}, "codec is '../snac'; the name of a sub-folder"),
        ({"eot_id": 1.5}, "eot_id is 1.5"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, entry, message):
    with pytest.raises(LoadError, match=message):
        load_model(tiny_orpheus.write_folder(tmp_path / "bad", **entry), device="cpu")


def test_without_snac_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "snac", None)
    with pytest.raises(MissingExtraError, match=r'pip install .*\[audio\]"'):
        load_model(folder, device="cpu")


# -- speaking ----------------------------------------------------------------------------------------------------------


def test_the_models_own_sampling_holds_unless_the_client_says_otherwise(make):
    engine = make()
    options = engine.submit("Hi", max_tokens=2).result().request.options
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.6, 0.8, 1.3)
    assert engine.model.default_options["max_tokens"] == 1024  # of a context of 2,048; 1,200 where there is room
    assert engine.generate("Hi", max_tokens=1, temperature=0).request.options.sampling.temperature == 0


def test_a_text_with_a_voice_is_framed(make):
    result = make().generate("Hi", fields={"voice": "leo"}, max_tokens=0)
    assert list(result.prompt_ids) == [193, 129, *map(ord, "leo: Hi"), 130, 194, 195, 191]


@pytest.mark.parametrize("chunk_frames", [1, 3, 4, 7])
def test_streamed_chunks_are_the_whole_decode(make, chunk_frames):
    engine = make()
    stream = speak(engine, "Hi", chunk_frames=chunk_frames, max_tokens=70, **SPEECH)
    chunks = list(stream)
    frames = frames_of(stream.generation.ids, engine.model.ids)
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert len(frames) == 10
    assert (samples == engine.model.sound(frames)).all()
    assert [chunk.first_sample for chunk in chunks] == list(np.cumsum([0, *(len(c.samples) for c in chunks[:-1])]))
    assert all(len(chunk.samples) >= chunk_frames * FRAME for chunk in chunks[:-1])


def test_sound_comes_before_the_end(make):
    engine = make()
    stream = speak(engine, "Hi", max_tokens=70, **SPEECH)
    first = next(iter(stream))
    assert len(first.samples) == FRAME
    assert stream.ttfa_ms is not None
    early = speak(engine, "Hi", max_tokens=70, **SPEECH)
    for _ in range(28):  # four frames: the first one and all it depends on
        assert list(early.ready()) == []
        engine.step()
    assert len(list(early.ready())) == 1


def test_leaving_the_loop_cancels_and_frees_the_pages(make):
    engine = make(prefix_cache=False)
    free = engine.kv.arena.num_free
    for _ in speak(engine, "Hi", max_tokens=200, **SPEECH):
        break
    assert engine.kv.arena.num_free == free
    stream = speak(engine, "Hi", max_tokens=200, **SPEECH)
    for _ in range(40):
        engine.step()
    stream.cancel()
    chunks = list(stream)  # what was complete can still be heard
    assert sum(len(chunk.samples) for chunk in chunks) == 5 * FRAME
    assert (stream.generation.finish_reason, engine.kv.arena.num_free) == ("cancelled", free)


def test_several_voices_in_one_batch_say_what_they_say_alone(make):
    voices = ("tara", "leo", "zoe")
    alone = [say(make(), "Hi", voice=voice, max_tokens=42, **SPEECH) for voice in voices]
    engine = make()
    speeches = collect([speak(engine, "Hi", voice=voice, max_tokens=42, **SPEECH) for voice in voices])
    decodes = [e.event for e in engine.events if e.event.kind == "StepRan" and e.event.walk == "decode"]
    assert all(len(step.spans) == 3 for step in decodes)
    assert [s.voice for s in speeches] == list(voices)
    for one, other in zip(alone, speeches, strict=True):
        assert one.generation.ids == other.generation.ids
        assert (one.samples == other.samples).all()


def test_chunks_of_several_voices_come_in_turn(make):
    engine = make()
    streams = [speak(engine, "Hi", voice=voice, max_tokens=42, **SPEECH) for voice in ("tara", "leo")]
    assert [index for index, _ in together(streams)][:4] == [0, 1, 0, 1]


def test_one_voice_that_fails_leaves_the_others(make):
    engine = make()

    def broken(ids):
        raise RuntimeError("no idea")

    bad = speak(engine, "Hi", max_tokens=42, allowed=broken)
    good = speak(engine, "Hi", max_tokens=42, **SPEECH)
    speeches = collect([bad, good])
    assert "no idea" in str(speeches[0].generation.error)
    assert len(speeches[1].samples) == 6 * FRAME
    with pytest.raises(kvlab.KvlabError, match="no idea"):
        say(engine, "Hi", max_tokens=42, allowed=broken)


def test_left_over_and_ignored_tokens_are_reported(make):
    speech = say(make(), "Hi", max_tokens=40, **SPEECH)
    assert (len(speech.frames), speech.left_over_tokens, speech.bad_frames, speech.ignored_tokens) == (5, 5, (), 0)
    wild = say(make(), "Hi", max_tokens=60, seed=3, temperature=2.0, top_p=1.0)
    assert len(wild.samples) == len(wild.frames) * FRAME
    assert wild.bad_frames or wild.ignored_tokens


def test_the_end_of_speech_ends_it_and_is_not_heard(make):
    engine = make()
    end = engine.model.ids.end_of_speech
    speech = say(engine, "Hi", max_tokens=60, only_speech=True, seed=1, logit_bias={end: 1e4})
    assert (speech.generation.finish_reason, list(speech.generation.ids), len(speech.samples)) == ("stop", [end], 0)
    assert speech.ignored_tokens == 0


def test_the_official_decoder_leaves_out_the_first_frame_and_the_last_two(make):
    engine = make()
    ours = say(engine, "Hi", max_tokens=70, **SPEECH)
    theirs = say(engine, "Hi", max_tokens=70, decoder="official", **SPEECH)
    assert theirs.generation.ids == ours.generation.ids
    assert (len(ours.samples), len(theirs.samples)) == (10 * FRAME, 7 * FRAME)


def test_a_rendered_prompt_and_the_text_share_all_pages(make):
    engine = make()
    engine.generate("Hello", fields={"voice": "leo"}, max_tokens=0)
    rendered = prompt_string("Hello", "leo").replace("<|begin_of_text|>", "<|begin_of_text|>" * 2)
    result = engine.generate(rendered, max_tokens=0)
    assert result.cached_tokens == (len(result.prompt_ids) - 1) // 8 * 8


# -- a hit changes nothing it should not -------------------------------------------------------------------------------


def test_a_repeated_prompt_hits_and_sounds_the_same(make):
    engine = make()
    cold, hit = (say(engine, "Hello there", max_tokens=42, **SPEECH) for _ in range(2))
    assert (cold.generation.cached_tokens, hit.generation.cached_tokens) == (0, 16)
    assert cold.generation.ids == hit.generation.ids
    assert (cold.samples == hit.samples).all()


def test_prompts_share_the_voice_and_the_words_before_they_part(make):
    engine = make(page_size=4)
    engine.generate("one red star", fields={"voice": "tara"}, max_tokens=0)
    same_voice = engine.generate("one red circle", fields={"voice": "tara"}, max_tokens=0)
    other_voice = engine.generate("one red star", fields={"voice": "leo"}, max_tokens=0)
    assert same_voice.cached_tokens == len("SB" + "tara: one red ") // 4 * 4  # S and B: start of human, begin token
    assert other_voice.cached_tokens == 0


def test_k4_1_the_penalty_covers_the_prompt_cold_and_after_a_hit(make):
    engine = make(page_size=4)
    masks = []
    for cached in (0, 20):
        handle = engine.submit("Hello there", max_tokens=2, temperature=0)
        engine.step()
        masks.append(engine.sampler.seen_ids(handle.rid))
        result = handle.result()
        assert result.cached_tokens == cached
    assert masks[0] == masks[1]
    assert set(result.prompt_ids) <= set(masks[0])


def test_b18_the_penalty_mask_after_a_hit_equals_the_uncached_runs(make):
    def run(engine: Any) -> tuple[list[int], tuple[int, ...]]:
        handle = engine.submit("Hello there, you", max_tokens=30, temperature=0, ignore_eos=True)
        while handle.outcome is None:
            mask = engine.sampler.seen_ids(handle.rid)
            engine.step()
        return mask, handle.outcome.ids

    uncached, cached = make(prefix_cache=False), make()
    run(cached)
    assert run(cached) == run(uncached)


def test_b18_without_being_told_of_the_skipped_prompt_the_run_goes_wrong(make, monkeypatch):
    """The test above can fail: this is what it would see."""
    engine = make()
    engine.generate("Hello there, you", max_tokens=0)
    monkeypatch.setattr(engine.sampler, "apply_cached_prefix", lambda *args: None)
    handle = engine.submit("Hello there, you", max_tokens=2)
    engine.step()
    assert not set(handle._run.prompt_ids) <= set(engine.sampler.seen_ids(handle.rid))


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_tokens", [42, 45])
def test_going_on_hits_generated_pages_and_sounds_like_one_utterance(make, first_tokens):
    engine = make(page_size=4)
    first = say(engine, "Hi", max_tokens=first_tokens, **SPEECH)
    rest = say(engine, first.continued(), max_tokens=70 - first_tokens, **SPEECH)
    generation = rest.generation
    assert list(generation.prompt_ids) == [*first.generation.prompt_ids, *first.generation.ids]
    assert generation.cached_tokens == (generation.prompt_tokens - 1) // 4 * 4
    frames = frames_of([*first.generation.ids, *generation.ids], engine.model.ids)
    assert first.frames + rest.frames == tuple(frames)
    assert (rest.samples == engine.model.sound(frames)[len(first.frames) * FRAME :]).all()


def test_the_next_utterance_is_heard_from_its_own_beginning(make):
    engine = make(page_size=4)
    first = say(engine, "Hi", max_tokens=28, **SPEECH)
    following = say(engine, first.generation.follow_up("Bye"), voice="leo", max_tokens=28, **SPEECH)
    assert following.generation.cached_tokens > len(first.generation.prompt_ids)
    assert (following.samples == engine.model.sound(following.frames)).all()
    assert (following.voice, following.text) == ("leo", "Bye")


def forced(model: OrpheusModel, tokens: list[int]) -> Callable[[Any], list[range]]:
    """What lets just these tokens be sampled, and then the end."""
    path = [*tokens, model.ids.end_of_speech]
    return lambda generated: [range(path[len(generated)], path[len(generated)] + 1)]


def some_frame(model: OrpheusModel) -> list[int]:
    return [model.ids.audio_id(slot, 10 + slot) for slot in range(7)]


@pytest.mark.parametrize(
    ("kept_slots", "damaged_at", "due"), [((0, 1, 2, 3, 4), 3, 5), ((0, 1, 3), None, 4), ((0, 1, 2, 3, 4, 5, 6), 5, 0)]
)
def test_going_on_after_damage_begins_at_the_slot_after_the_last_one(make, model, kept_slots, damaged_at, due):
    engine, frame = make(), some_frame(model)
    tokens = [*frame, *(frame[slot] for slot in kept_slots)]
    if damaged_at is not None:
        tokens.insert(7 + damaged_at, ord("x"))  # an id that is no audio, and counts for no slot
    first = say(engine, "Hi", max_tokens=len(tokens), allowed=forced(model, tokens))
    assert list(first.generation.ids) == tokens
    rest = say(engine, first.continued(), max_tokens=21, **SPEECH)
    assert model.ids.split(rest.generation.ids[0])[0] == due
    assert rest.bad_frames == ()


# -- results and files -------------------------------------------------------------------------------------------------


def test_a_speech_says_its_numbers_and_writes_a_file(make, tmp_path):
    speech = say(make(), "Hi", voice="leo", max_tokens=28, **SPEECH)
    assert repr(speech) == "Speech(leo: 'Hi', 0.34 s in 4 frames, cached 0 of 13 prompt tokens)"
    samples, rate = soundfile.read(speech.save(tmp_path / "leo.wav"), dtype="int16")
    assert rate == 24000
    assert (samples == speech.samples).all()


@pytest.mark.parametrize("damaged", [True, False])
def test_a_repeated_frame_is_among_the_frames_of_a_speech(make, model, damaged):
    frame = some_frame(model)
    tokens = [*frame, *frame[:3], *frame[4 if damaged else 3 :], *frame, *frame]
    speech = say(make(), "Hi", max_tokens=60, repeat_bad=True, allowed=forced(model, tokens))
    assert len(speech.bad_frames) == damaged
    assert len(speech.frames) == 4
    assert (speech.samples == model.sound(speech.frames)).all()
    assert "0.34 s in 4 frames" in speech.caption


@pytest.mark.parametrize(
    ("how", "voice"),
    [({}, "tara"), ({"voice": None}, None), ({"voice": ""}, None), ({"fields": {"voice": "leo"}}, "leo")],
)
def test_the_voice_of_a_speech_is_the_one_that_was_written(make, how, voice):
    speech = say(make(), "Hi", max_tokens=7, **SPEECH, **how)
    assert speech.voice == voice
    written = f"{voice}: Hi" if voice else "Hi"
    assert speech.generation.prompt_ids[2:-4] == tuple(map(ord, written))


def test_what_has_its_voice_in_it_is_told_no_voice_of_its_own(make):
    engine = make()
    first = say(engine, "Hi", voice="leo", max_tokens=14, **SPEECH)
    ids = list(first.generation.prompt_ids)
    whole = prompt_string("Hi", "leo")
    for prompt in (ids, whole, first.continued(), first.generation.follow_up(whole)):
        assert say(engine, prompt, max_tokens=7, **SPEECH).voice is None
        with pytest.raises(InputError, match="its voice is in it; leave out the field voice"):
            say(engine, prompt, voice="tara", max_tokens=7, **SPEECH)


def test_other_noise_gives_other_samples_for_the_same_tokens(make):
    engine = make()
    speech = say(engine, "Hi", max_tokens=28, **SPEECH)
    other = say(engine, "Hi", max_tokens=28, noise=SeededNoise(1), **SPEECH)
    assert speech.generation.ids == other.generation.ids
    assert (speech.samples != other.samples).any()
    assert (other.samples == engine.model.sound(speech.frames, noise=SeededNoise(1))).all()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        ("", {}, "text to speak is empty"),
        (None, {}, "got NoneType"),
        (5, {}, "a prompt is a str.* got int"),
        ("Hi", {"voice": "tom"}, "no voice 'tom'; there are: tara, leo, zoe"),
        ("Hi " * 800, {}, "the context of tiny is 2048; shorten the prompt"),
        ("Hi", {"chunk_frames": 0}, "chunk_frames is 0"),
        ("Hi", {"decoder": "mine"}, "no decoder 'mine'; there are: kvlab, official"),
        ("Hi", {"on_token": print}, "on_token is how speak takes the tokens"),
        ("Hi", {"temprature": 1}, "unknown option temprature; did you mean temperature"),
        ("Hi", {"noise": SeededNoise(0), "fields": {"speed": 2}}, "knows no field 'speed'"),
    ],
)
def test_bad_input_is_named_and_the_engine_stays_usable(make, text, how, message):
    engine = make()
    with pytest.raises(InputError, match=message):
        speak(engine, text, **how)
    assert len(say(engine, "Hi", max_tokens=14, **SPEECH).samples) == 2 * FRAME


def test_the_prompt_processor_travels_to_a_process(model, checked):
    with build_engine(model, num_pages=64, page_size=8, preprocess="process") as engine:
        checked.append(engine)
        assert len(say(engine, "Hi", max_tokens=14, **SPEECH).frames) == 2


def test_root_and_prompts_depend_on_the_ids_and_voices(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["orpheus"]["voices"] == ["tara", "leo", "zoe"]
    other = tiny_orpheus.write_folder(tmp_path / "other", voices=["zoe"])
    assert load_model(other, device="cpu").preprocess_fingerprint() != load_model(folder, device="cpu").preprocess_fingerprint()


def test_sound_is_computed_where_the_codec_is(model):
    assert model.codec.decode([(0,) * 7]).device == torch.device("cpu")
