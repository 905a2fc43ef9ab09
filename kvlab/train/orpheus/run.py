"""The stages from nothing, or from an earlier checkpoint, to a checkpoint, each kept in the work folder and skipped when it
is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from kvlab.progress import progress
from kvlab.train import loop
from kvlab.train.orpheus import codec, corpus, export, speech
from kvlab.train.orpheus.vocabulary import make_tokenizer, prompt_ids

CHUNK = 500
NUM_UNSEEN = 24
UNSEEN_SEED = 1


@dataclass(frozen=True)
class Plan:
    """How much of everything; as it stands about two hours on two cores.

    The same plan gives the same checkpoint, however often the run was killed. With ``start``, the folder of a checkpoint, the
    codec is the one in it, and the speech model goes on from its weights.
    """

    work: Path
    codec_phrases: int = 400
    codec_steps: int = 3000
    decoder_steps: int = 2000
    speech_phrases: int = 4737  # every text that is not held out, by every voice
    speech_steps: int = 6000
    seed: int = 0
    start: Path | None = None


def _kept(path: Path, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return what ``path`` holds, made first where it is missing."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(), path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
    kept: list[Tensor] = torch.load(path, weights_only=True)
    return kept


def recordings(plan: Plan) -> list[Tensor]:
    """Return the recordings the codec learns from."""

    def make() -> list[Tensor]:
        said = corpus.phrases(plan.codec_phrases, seed=plan.seed, varied=True)
        return [torch.from_numpy(corpus.speak(phrase)) for phrase in progress(said, "recording")]

    return _kept(plan.work / "recordings.pt", make)


def train_codec(plan: Plan) -> nn.Module:
    """Return the trained codec.

    Raises:
        LoadError: ``plan.start`` holds no checkpoint of this shape.
    """
    if plan.start is not None:
        return export.read_codec(plan.start / "snac")
    sounds = recordings(plan)
    first = codec.CodecTask(sounds, num_steps=plan.codec_steps, seed=plan.seed)
    loop.train(first, plan.work / "codec.pt", num_steps=plan.codec_steps, seed=plan.seed)
    second = codec.DecoderTask(first.net, sounds)
    loop.train(second, plan.work / "decoder.pt", num_steps=plan.decoder_steps, seed=plan.seed)
    return first.net.eval().requires_grad_(False)


def lines(plan: Plan, net: nn.Module) -> tuple[list[speech.Line], list[speech.Line]]:
    """Return the lines the speech model learns from, and a few of held-out phrases to watch it by."""
    seen = corpus.phrases(plan.speech_phrases, seed=plan.seed)
    unseen = corpus.phrases(NUM_UNSEEN, seed=UNSEEN_SEED, held_out=True)
    chunks = [(seen[start : start + CHUNK], plan.work / f"codes-{start}.pt") for start in range(0, len(seen), CHUNK)]
    _encode_side_by_side(net, [chunk for chunk in chunks if not chunk[1].is_file()])
    codes = [line for phrases, path in chunks for line in _codes(net, phrases, path)]
    unseen_codes = _codes(net, unseen, plan.work / "codes-unseen.pt")
    return _lines(seen, codes), _lines(unseen, unseen_codes)


def _codes(net: nn.Module, phrases: Sequence[corpus.Phrase], path: Path) -> list[Tensor]:
    def make() -> list[Tensor]:
        said = progress(phrases, "recording and encoding")
        return [codec.encode(net, torch.from_numpy(corpus.speak(phrase))) for phrase in said]

    return _kept(path, make)


def _encode_side_by_side(net: nn.Module, chunks: Sequence[tuple[Sequence[corpus.Phrase], Path]]) -> None:
    """Make the files of all chunks, in as many processes as the run has threads."""
    num_processes = min(torch.get_num_threads(), len(chunks))
    if num_processes < 2:
        return
    make = partial(_encode_chunk, net.state_dict())
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        for _ in progress(pool.map(make, chunks), "recording and encoding", total=len(chunks), unit="file"):
            pass


def _encode_chunk(weights: Mapping[str, Tensor], chunk: tuple[Sequence[corpus.Phrase], Path]) -> None:
    torch.set_num_threads(1)
    net, (phrases, path) = codec.from_weights(weights), chunk
    _kept(path, lambda: [codec.encode(net, torch.from_numpy(corpus.speak(phrase))) for phrase in phrases])


def _lines(phrases: Sequence[corpus.Phrase], codes: Sequence[Tensor]) -> list[speech.Line]:
    tokenizer = make_tokenizer()
    asked = [prompt_ids(tokenizer, phrase.prompt) for phrase in phrases]
    return [speech.Line(ids, frames) for ids, frames in zip(asked, codes, strict=True)]


def train_speech(plan: Plan, net: nn.Module) -> LlamaForCausalLM:
    """Return the speech model trained on what a codec makes of the phrases."""
    seen, unseen = lines(plan, net)
    task = speech.SpeechTask(seen, unseen, seed=plan.seed)
    if plan.start is not None:
        export.read_into(task.net, plan.start)
    loop.train(task, plan.work / "speech.pt", num_steps=plan.speech_steps, seed=plan.seed)
    return cast(LlamaForCausalLM, task.net.eval().requires_grad_(False))
