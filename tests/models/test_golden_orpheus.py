"""Numbers the released code computed, and kvlab's beside them: prompts, streams, sound, and the Llama through pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_orpheus import GOLDEN, make_tokenizer
from torch import Tensor

from kvlab.assemble import build_engine
from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.models.orpheus.codec import Codec, load_codec
from kvlab.models.orpheus.noise import GivenNoise, NoNoise
from kvlab.models.orpheus.official import OfficialDecoder, prompt_string, window_audio, window_levels
from kvlab.models.orpheus.prompts import OrpheusProcessor
from kvlab.models.orpheus.spec import MAX_TOKENS, SAMPLING
from kvlab.models.orpheus.tokens import OrpheusIds, from_levels
from kvlab.models.text import TextModel
from kvlab.models.textlm import TextConfig, TextLM
from kvlab.models.tracer import ToyProcessor
from kvlab.spec import RowInputs, StepRow, StepTables

pytest.importorskip("snac")

MAX_AUDIO_ERROR = 1e-5  # threads and float64 move it by 1.3e-6
MAX_INT16_ERROR = 1
MAX_LOGIT_ERROR = 2.5e-5  # of the standard deviation of the logits; float64 moves them by 6.8e-6 of it
PAGE = 4


def read_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


AUDIO = load_file(GOLDEN / "audio.safetensors")
LLAMA = load_file(GOLDEN / "llama.safetensors")
STREAMS = read_json("streams.json")
DIRECT = read_json("convert_to_audio_direct.json")
PROMPTS = read_json("prompts.json")


@pytest.fixture(scope="module")
def codec() -> Codec:
    return load_codec(GOLDEN / "tiny_snac")


@pytest.fixture(scope="module")
def noise() -> GivenNoise:
    stages = load_file(GOLDEN / "tiny_snac" / "noise.safetensors")
    return GivenNoise({stage: stages[f"noise.stage{stage}"] for stage in range(4)})


def most_apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max()) if len(ours) else 0.0


# -- prompts and defaults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [p for p in PROMPTS if p["ids"]], ids=lambda p: f"{p['voice']}-{p['prompt']}")
def test_prompt_ids(prompt):
    processor = OrpheusProcessor(make_tokenizer(), ids=OrpheusIds(), vocab_size=156940)
    fields = {} if prompt["voice"] == "(argument left out)" else {"voice": prompt["voice"]}
    assert processor.process_prompt(prompt["prompt"], fields).tensors["tokens"] == prompt["ids"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{p['voice']}-{p['model_type']}-{p['prompt']}")
def test_prompt_strings(prompt):
    given = [prompt[key] for key in ("voice", "model_type") if prompt[key] != "(argument left out)"]
    assert prompt_string(prompt["prompt"], *given) == prompt["prompt_string"]


def test_sampling_defaults_are_those_of_the_released_method():
    released = read_json("defaults.json")["generate_tokens_sync"]
    assert {name: released[name] for name in SAMPLING} == SAMPLING
    assert released["max_tokens"] == MAX_TOKENS


# -- token streams through the released decoder ------------------------------------------------------------------------


def texts_of(stream: dict[str, Any]) -> Iterator[str]:
    found = stream["stream"]
    if isinstance(found, list):
        yield from found
    else:
        yield from ("".join(found["pieces"][:length]) for length in found["prefix_lengths"])


def play(codec: Codec, noise: GivenNoise, stream: dict[str, Any]) -> tuple[OfficialDecoder, list[Tensor], str | None]:
    decoder, played = OfficialDecoder(codec, noise), []
    try:
        for text in texts_of(stream):
            samples = decoder.push_text(text)
            if samples is not None:
                played.append(samples)
    except IndexError as error:
        return decoder, played, f"IndexError: {error}"
    return decoder, played, None


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s["name"])
def test_official_streams(codec, noise, stream):
    decoder, played, error = play(codec, noise, stream)
    assert [list(token) for token in decoder.tokens] == stream["tokens"]
    assert (len(decoder.accepted), error) == (stream["accepted"], stream["error"])
    for window in stream["windows"]:
        values = decoder.accepted[window["first"] : window["count"]]
        assert values == window["window"]
        if window["layers"]:
            assert list(window_levels(values)) == window["layers"]
    heard = [j for j, window in enumerate(stream["windows"]) if window["emitted_samples"]]
    assert len(played) == len(heard)
    for samples, j in zip(played, heard, strict=True):
        assert most_apart(samples, AUDIO[f"{stream['name']}.chunk{j}.int16"]) <= MAX_INT16_ERROR


@pytest.mark.parametrize("window", DIRECT, ids=lambda w: str(w["n_tokens"]))
def test_official_window(codec, noise, window):
    samples = window_audio(codec, window["input"], noise)
    assert (None if samples is None else len(samples)) == window["returned"]
    if window["layers"]:
        assert list(window_levels(window["input"])) == window["layers"]
    if window["returned"]:
        assert most_apart(samples, AUDIO[f"direct.{window['n_tokens']}.int16"]) <= MAX_INT16_ERROR


# -- the codec ---------------------------------------------------------------------------------------------------------


def levels(name: str) -> list[list[int]]:
    return [AUDIO[f"{name}.codes{level}"][0].tolist() for level in range(3)]


@pytest.mark.parametrize("name", [key for key in AUDIO if key.endswith("window0.audio")])
def test_whole_windows(codec, noise, name):
    layers = next(s for s in STREAMS if s["name"] == name.split(".")[0])["windows"][0]["layers"]
    assert most_apart(codec.decode(from_levels(layers), noise=noise), AUDIO[name][0, 0]) <= MAX_AUDIO_ERROR


def test_a_decode_in_one_go(codec, noise):
    frames = from_levels(levels("whole_5_frames"))
    assert most_apart(codec.decode(frames, noise=noise), AUDIO["whole_5_frames.audio"][0, 0]) <= MAX_AUDIO_ERROR
    assert most_apart(codec.decode(frames, noise=NoNoise()), AUDIO["whole_5_frames.audio_zero_noise"][0, 0]) <= MAX_AUDIO_ERROR


def test_codes_of_a_recording(codec):
    assert codec.encode(AUDIO["encode.wave"][0, 0], 24000) == from_levels(levels("encode"))


def test_tensors_of_the_released_codec_are_those_of_our_reading_of_its_config():
    from snac import SNAC

    config = read_json("tiny_snac/config.json") | {"encoder_dim": 48, "decoder_dim": 1024, "codebook_dim": 8}
    with torch.device("meta"):
        ours = {name: list(tensor.shape) for name, tensor in SNAC(**config).state_dict().items()}
    lines = (GOLDEN / "real_snac_24khz_tensors.tsv").read_text(encoding="utf-8").splitlines()
    assert ours == {name: json.loads(shape) for name, shape in (line.split("\t") for line in lines if line[0] != "#")}


# -- the tiny Llama ----------------------------------------------------------------------------------------------------


class Recorded(TextModel):
    """Keeps the logits of every row that was asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: list[Tensor] = []

    def forward(self, walk, rows, attention):
        out = super().forward(walk, rows, attention)
        self.logits += [logits[-1] for logits in out if logits is not None]
        return out


@pytest.fixture(scope="module")
def net() -> TextLM:
    net = TextLM.allocate(TextConfig.from_hf(read_json("tiny_llama/config.json")))
    net.load_weights(load_file(GOLDEN / "tiny_llama" / "model.safetensors").items())
    return net


def close(ours: Tensor, theirs: Tensor) -> bool:
    return most_apart(ours, theirs) <= MAX_LOGIT_ERROR * float(theirs.std())


@pytest.mark.parametrize("first", [0, 9000])
def test_llama_logits_and_kv_at_positions_from(net, first):
    ids = LLAMA["ids"].tolist()
    model = TextModel(net, ToyProcessor(256), name="golden", identity="golden")
    store = KVStore(model.kv_layout(PAGE), 6)
    attention = TorchPagedAttention(store, num_heads=model.num_heads)
    pages = [5, 2, 4]
    attention.begin(StepTables(PAGE, (StepRow("r", "main", pages, len(ids), len(ids)),)))
    (logits,) = net([RowInputs(ids, range(first, first + len(ids)), 0)], attention)
    assert close(logits, LLAMA[f"pos{first}.logits"])
    for layer in range(2):
        assert close(store.keys(layer)[pages].flatten(0, 1), LLAMA[f"pos{first}.k.{layer}"])
        assert close(store.values(layer)[pages].flatten(0, 1), LLAMA[f"pos{first}.v.{layer}"])


@pytest.mark.parametrize(("name", "penalty"), [("greedy", 1.0), ("greedy_penalty_1.3", 1.3)])
def test_llama_greedy_run_through_pages_cold_and_after_a_hit(net, checked, name, penalty):
    model = Recorded(net, ToyProcessor(256), name="golden", identity="golden")
    engine = build_engine(model, num_pages=32, page_size=PAGE, prefix_cache_salt="golden")
    checked.append(engine)
    for cached in (0, 8):
        model.logits.clear()
        result = engine.generate(LLAMA["ids"].tolist(), max_tokens=12, repetition_penalty=penalty)
        assert result.cached_tokens == cached
        assert list(result.ids) == LLAMA[f"{name}.ids"].tolist()
        if name == "greedy":
            assert close(torch.stack(model.logits), LLAMA["greedy.logits"])
        else:
            assert close(penalised(model.logits, result), LLAMA["greedy_penalty_1.3.logits_after"])


def penalised(logits: list[Tensor], result: Any) -> Tensor:
    """The logits after the penalty, by its definition: seen ids divided where positive, multiplied where negative."""
    rows = []
    for step, row in enumerate(logits):
        seen = sorted({*result.prompt_ids, *result.ids[:step]})
        changed = row.clone()
        changed[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        rows.append(changed)
    return torch.stack(rows)
