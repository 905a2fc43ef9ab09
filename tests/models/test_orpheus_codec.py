"""The codec and kvlab's stream decoder: reach, noise, and samples that do not depend on how a stream was cut."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_orpheus import GOLDEN, write_codec
from torch import Tensor

from kvlab.errors import InputError, LoadError
from kvlab.lab.audio import compare_samples, find_clicks
from kvlab.models.orpheus.codec import Codec, load_codec
from kvlab.models.orpheus.noise import GivenNoise, NoNoise, SeededNoise
from kvlab.models.orpheus.reach import plan, reach_latents
from kvlab.models.orpheus.sound import write_wav
from kvlab.models.orpheus.speech import FrameDecoder, SpeechDecoder, decode_frames, to_int16
from kvlab.models.orpheus.tokens import Frame, FrameReader, OrpheusIds, ids_of, to_levels

pytest.importorskip("snac")

IDS = OrpheusIds()
MAX_AUDIO_ERROR = 1e-5


@pytest.fixture(scope="module")
def codec() -> Codec:
    return load_codec(GOLDEN / "tiny_snac")


def some_frames(count: int, seed: int = 0) -> list[Frame]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(4096) for _ in range(7)) for _ in range(count)]


def stream(codec: Codec, frames: Sequence[Frame], chunk_frames: int, **how: object) -> Tensor:
    decoder, parts = FrameDecoder(codec, **how), []
    for start in range(0, len(frames), chunk_frames):
        parts += decoder.push(frames[start : start + chunk_frames])
    return torch.cat([*parts, *decoder.finish()])


# -- reach -------------------------------------------------------------------------------------------------------------


def test_reach_is_what_the_decoder_shows(codec):
    """NaN in one latent spreads to every sample that depends on it, however weakly, and to no other."""
    num, here = 40, 20
    z = torch.zeros(1, codec.net.latent_dim, num)
    z[..., here] = torch.nan
    touched = codec.net.decoder(z).isnan()[0, 0].nonzero().flatten()
    reach = reach_latents(codec.ops)
    first, last = int(touched[0]), int(touched[-1])
    assert (first // codec.hop_samples, last // codec.hop_samples) == (here - reach, here + reach)
    for sample in (first - 1, first, last, last + 1):
        needed = plan(codec.ops, range(sample, sample + 1), num)[0]
        assert (here in needed) == (first <= sample <= last)


def test_a_frame_needs_three_frames_on_either_side(codec):
    assert (codec.reach_frames, codec.frame_samples, codec.sample_rate) == (3, 2048, 24000)
    assert codec.reach_frames * codec.latents_per_frame >= reach_latents(codec.ops)


@pytest.mark.parametrize("frame", [0, 1, 5, 8, 9])
def test_some_frames_of_a_window_sound_as_in_the_whole(codec, frame):
    frames = some_frames(10)
    part = codec.decode(frames, heard=range(frame, frame + 1))
    whole = codec.decode(frames)[frame * 2048 : (frame + 1) * 2048]
    assert float((part - whole).abs().max()) <= MAX_AUDIO_ERROR


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_depends_on_seed_stage_and_place_alone():
    noise = SeededNoise(3)
    whole = noise(2, 0, 20000)
    assert torch.equal(noise(2, 7000, 5000), whole[7000:12000])
    assert torch.equal(SeededNoise(3)(2, 19999, 1), whole[-1:])
    assert not torch.equal(noise(1, 0, 20000), whole)
    assert not torch.equal(SeededNoise(4)(2, 0, 20000), whole)
    assert abs(float(whole.mean())) < 0.03
    assert abs(float(whole.std()) - 1) < 0.03


def test_decoding_draws_nothing_from_shared_generators(codec):
    torch.manual_seed(5)
    np.random.seed(5)
    before, before_np = torch.get_rng_state(), np.random.get_state()[1].copy()
    codec.decode(some_frames(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == before_np).all()


def test_equal_codes_give_equal_samples_again_and_other_seeds_give_others(codec):
    frames = some_frames(6)
    first = decode_frames(codec, frames)
    assert torch.equal(decode_frames(load_codec(GOLDEN / "tiny_snac"), frames), first)
    assert torch.equal(decode_frames(codec, frames, noise=SeededNoise(0)), first)
    assert compare_samples(decode_frames(codec, frames, noise=SeededNoise(1)), first).max_abs > 0.01
    assert compare_samples(decode_frames(codec, frames, noise=NoNoise()), first).max_abs > 0.01


def test_recorded_noise_that_is_too_short_is_refused():
    with pytest.raises(InputError, match=r"noise of stage 1 at 90..110 was asked for, and 100 values were given"):
        GivenNoise({1: torch.zeros(100)})(1, 90, 20)
    with pytest.raises(InputError, match="the noise seed is 'a'"):
        SeededNoise("a")


# -- any chunks, the same samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_frames", [1, 3, 4, 7])
def test_ten_frames_streamed_are_bit_equal_to_the_whole_decode(codec, chunk_frames):
    frames = some_frames(10)
    streamed = stream(codec, frames, chunk_frames)
    assert len(streamed) == 20480
    assert torch.equal(streamed, decode_frames(codec, frames))


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 6, 7, 8, 10])
def test_the_whole_decode_is_close_to_decoding_in_one_go(codec, num_frames):
    frames = some_frames(num_frames, seed=num_frames)
    ours, at_once = decode_frames(codec, frames), codec.decode(frames)
    assert float((ours - at_once).abs().max()) <= MAX_AUDIO_ERROR
    assert int((to_int16(ours).int() - to_int16(at_once).int()).abs().max()) <= 1


def test_a_frame_is_heard_once_its_context_is_there(codec):
    decoder = FrameDecoder(codec)
    given = [sum(map(len, decoder.push([frame]))) // 2048 for frame in some_frames(6)]
    assert given == [0, 0, 0, 1, 1, 1]
    assert sum(map(len, decoder.finish())) == 3 * 2048


def test_what_was_heard_before_is_context_and_is_not_heard_again(codec):
    frames = some_frames(9)
    decoder = FrameDecoder(codec)
    decoder.skip(frames[:4])
    rest = torch.cat([*decoder.push(frames[4:]), *decoder.finish()])
    assert torch.equal(rest, decode_frames(codec, frames)[4 * 2048 :])


def test_a_long_stream_keeps_no_more_than_a_window(codec):
    decoder = FrameDecoder(codec)
    kept = 0
    for frame in some_frames(40):
        decoder.push([frame])
        kept = max(kept, len(decoder._frames))
    assert kept <= 2 * codec.reach_frames + 1


@pytest.mark.parametrize(
    ("tokens", "samples", "left_over"), [(0, 0, 0), (5, 0, 5), (7, 2048, 0), (27, 6144, 6), (28, 8192, 0), (35, 10240, 0)]
)
def test_k17_1_short_speech_is_heard(codec, tokens, samples, left_over):
    decoder = SpeechDecoder(FrameReader(IDS), FrameDecoder(codec))
    parts = [part for token in ids_of(some_frames(5), IDS)[:tokens] for part in decoder.push(token)]
    parts += decoder.finish()
    assert (sum(map(len, parts)), decoder.reader.num_left_over) == (samples, left_over)


def test_k17_3_code_0_is_heard_with_all_other_frames(codec):
    frames = some_frames(10)
    frames[4] = (0, *frames[4][1:])
    decoder = SpeechDecoder(FrameReader(IDS), FrameDecoder(codec))
    parts = [part for token in ids_of(frames, IDS) for part in decoder.push(token)]
    assert torch.equal(torch.cat([*parts, *decoder.finish()]), decode_frames(codec, frames))


class LinearToy:
    """A codec with a reach of three frames: each frame's first code, faded linearly over the frames around it."""

    frame_samples, reach_frames = 2048, 3

    def decode(self, frames, *, noise=None, start_frame=0, heard):
        spread = self.frame_samples * self.reach_frames
        places = np.repeat([frame[0] / 4096 for frame in frames], self.frame_samples)
        kernel = 1 - np.abs(np.arange(-spread, spread + 1)) / spread
        whole = np.convolve(places, kernel / kernel.sum())[spread:-spread]
        return torch.from_numpy(whole[heard.start * self.frame_samples : heard.stop * self.frame_samples])


SINE = [(int(2048 + 1500 * np.sin(i / 3)),) * 7 for i in range(20)]


def test_k17_7_clicks_at_seams_without_overlap():
    toy = LinearToy()
    butted = decode_frames(toy, SINE, window_frames=4, overlap_frames=0)
    assert find_clicks(butted.numpy()) == [8192, 16384, 24576, 32768]


@pytest.mark.parametrize(("overlap", "equal"), [(0, False), (2, False), (3, True), (5, True)])
def test_k17_7_equal_to_the_whole_once_the_overlap_covers_the_reach(overlap, equal):
    toy = LinearToy()
    whole = toy.decode(SINE, heard=range(len(SINE)))
    chunked = decode_frames(toy, SINE, window_frames=4, overlap_frames=overlap)
    assert torch.allclose(chunked, whole, rtol=0, atol=1e-12) == equal
    if equal:
        assert find_clicks(chunked.numpy()) == []


def test_k17_7_butted_chunks_of_the_codec_differ_and_frames_in_their_own_windows_do_not(codec):
    frames = some_frames(12)
    at_once = codec.decode(frames)
    butted = decode_frames(codec, frames, window_frames=4, overlap_frames=0)
    assert compare_samples(butted, at_once).max_abs > 0.01
    assert compare_samples(decode_frames(codec, frames), at_once).max_abs <= MAX_AUDIO_ERROR
    assert compare_samples(decode_frames(codec, frames, window_frames=4), at_once).max_abs <= MAX_AUDIO_ERROR


def test_a_window_without_frames_is_refused(codec):
    with pytest.raises(InputError, match="window_frames is 0"):
        FrameDecoder(codec, window_frames=0)


# -- files -------------------------------------------------------------------------------------------------------------


def test_both_forms_of_weights_give_the_same_codec(tmp_path):
    write_codec(tmp_path / "torch")
    write_codec(tmp_path / "safe", as_torch=False)
    frames = some_frames(2)
    assert torch.equal(load_codec(tmp_path / "torch").decode(frames), load_codec(tmp_path / "safe").decode(frames))


class Evil:
    def __reduce__(self):
        return (print, ("a pickle ran",))


def test_a_pickle_that_would_run_is_not_run(tmp_path, capsys):
    write_codec(tmp_path / "snac")
    torch.save({"decoder": Evil()}, tmp_path / "snac" / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model.bin is no plain file of tensors"):
        load_codec(tmp_path / "snac")
    assert "a pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_size": 64}, "do not fit its config.json"),
        ({"vq_strides": [8, 4, 2, 1]}, "do not fit its config.json"),
        ({"bits": 3}, "is no config of a SNAC codec"),
    ],
)
def test_a_config_of_another_codec_is_refused(tmp_path, changes, message):
    write_codec(tmp_path / "snac", **changes)
    with pytest.raises(LoadError, match=message):
        load_codec(tmp_path / "snac")


def test_codecs_that_cannot_be_cut_into_frames_are_refused():
    from snac import SNAC

    config = json.loads((GOLDEN / "tiny_snac" / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(LoadError, match=r"strides \[8, 4, 2, 1\]; frames of 7 tokens need \[4, 2, 1\]"):
        Codec(SNAC(**config | {"vq_strides": [8, 4, 2, 1]}))
    with pytest.raises(LoadError, match="attention window"):
        Codec(SNAC(**config | {"attn_window_size": 32, "encoder_dim": 8, "decoder_dim": 64}))


def test_missing_and_cut_files_are_named(tmp_path):
    shutil.copytree(GOLDEN / "tiny_snac", tmp_path / "snac")
    weights = tmp_path / "snac" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(LoadError, match="is not a whole safetensors file"):
        load_codec(tmp_path / "snac")
    weights.unlink()
    with pytest.raises(LoadError, match="has neither model.safetensors nor pytorch_model.bin"):
        load_codec(tmp_path / "snac")


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros(4096), 22050, "22050 samples a second and the codec 24000; resample it first"),
        (np.full(4096, np.nan), 24000, "4096 of 4096 samples are NaN"),
        (np.zeros((2, 4096)), 24000, "give one channel"),
        (np.zeros(0), 24000, "give one channel of at least one sample"),
    ],
)
def test_recordings_that_cannot_be_encoded_are_named(codec, samples, rate, message):
    with pytest.raises(InputError, match=message):
        codec.encode(samples, rate)


def test_codes_as_floats_are_refused_and_the_codec_stays_usable(codec):
    with pytest.raises(InputError, match="frame 0, slot 0: the code is 1.5"):
        codec.decode([(1.5, 1, 2, 3, 4, 5, 6)])
    assert len(codec.decode(some_frames(1))) == 2048


def test_no_frames_are_no_samples(codec):
    assert len(codec.decode([])) == len(decode_frames(codec, [])) == 0


def test_levels_are_those_of_the_codec(codec):
    frames = some_frames(2)
    levels = to_levels(frames)
    assert [len(level) for level in levels] == [2, 4, 8]
    assert torch.equal(codec.decode_levels(levels), codec.decode(frames))


def test_a_wav_file_holds_the_samples_clipped(tmp_path):
    soundfile = pytest.importorskip("soundfile")

    path = write_wav(tmp_path / "größe mit blank.wav", np.array([0.0, 0.5, 2.0, -2.0]), 24000)
    found, rate = soundfile.read(path, dtype="int16")
    assert (found.tolist(), rate) == ([0, 16383, 32767, -32767], 24000)
    exact = np.array([1, -2, 32767, -32768], np.int16)
    assert soundfile.read(write_wav(tmp_path / "b.wav", exact, 24000), dtype="int16")[0].tolist() == exact.tolist()


@pytest.mark.parametrize(
    ("name", "samples", "rate", "message"),
    [
        ("a.wav", [0.0, float("nan")], 24000, "1 of 2 samples are NaN"),
        ("a.wav", [0.0], 0, "sample rate is 0; give a whole number from 1 to 384000"),
        ("a.wav", [0.0], 24000.5, "sample rate is 24000.5"),
        ("a.mp3", [0.0], 24000, "does not end in .wav"),
        ("nowhere/a.wav", [0.0], 24000, "no sound can be written to .*No such file or directory"),
    ],
)
def test_wav_files_that_cannot_be_written_are_named(tmp_path: Path, name, samples, rate, message):
    with pytest.raises(InputError, match=message):
        write_wav(tmp_path / name, samples, rate)
    assert list(tmp_path.iterdir()) == []
