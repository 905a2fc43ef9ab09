"""What the judge hears in recordings, in their codec round trips and in the model's own speech, on held-out phrases."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvlab.train.orpheus import codec, corpus, export
from kvlab.train.orpheus.judge import Judge
from kvlab.train.orpheus.vocabulary import END_OF_SPEECH, custom, frames_of, prompt_ids

NUM_PHRASES = 60
EVALUATION_SEED = 2
MAX_FRAMES = 60

Sounds = list[NDArray[np.float32]]


def evaluate(folder: Path, *, num_phrases: int = NUM_PHRASES, seed: int = EVALUATION_SEED) -> dict[str, Any]:
    """Return the judged shares of a checkpoint; what needs espeak-ng is None, with the reason, where that is missing."""
    net, tokenizer, codec_net = export.read(folder)
    judge = Judge()
    phrases = corpus.phrases(num_phrases, seed=seed, held_out=True)
    texts = [phrase.text for phrase in phrases]
    found: dict[str, Any] = {"phrases": len(texts), "words": sum(len(text.split()) for text in texts)}
    found |= _of_recordings(judge, phrases, texts, codec_net)
    spoken, ended = synthesise(net, tokenizer, codec_net, phrases, seed=seed)
    found["synthesised"] = judge.share(texts, spoken)
    found["synthesised_by_voice"] = _by_voice(judge, phrases, spoken)
    found["synthesised_against_other_texts"] = judge.share(texts[1:] + texts[:1], spoken)
    found["ended_by_themselves"] = ended / len(texts)
    found["seconds_a_phrase"] = sum(map(len, spoken)) / len(spoken) / corpus.SAMPLE_RATE
    return found


def _of_recordings(judge: Judge, phrases: Sequence[corpus.Phrase], texts: list[str], codec_net: nn.Module) -> dict[str, Any]:
    if shutil.which("espeak-ng") is None:
        return {"original": None, "codec": None, "skipped": "original and codec need espeak-ng, which is not installed"}
    originals = [corpus.speak(phrase) for phrase in phrases]
    through = [_round_trip(codec_net, sound) for sound in originals]
    return {"original": judge.share(texts, originals), "codec": judge.share(texts, through)}


def _round_trip(codec_net: nn.Module, sound: NDArray[np.float32]) -> NDArray[np.float32]:
    frames = codec.encode(codec_net, torch.from_numpy(sound))
    return codec.decode(codec_net, frames).numpy()[: len(sound)]


def _by_voice(judge: Judge, phrases: Sequence[corpus.Phrase], spoken: Sounds) -> dict[str, float]:
    shares = {}
    for voice in corpus.VOICES:
        places = [i for i, phrase in enumerate(phrases) if phrase.voice == voice]
        shares[voice] = judge.share([phrases[i].text for i in places], [spoken[i] for i in places])
    return shares


@torch.inference_mode()
def synthesise(
    net: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    codec_net: nn.Module,
    phrases: Sequence[corpus.Phrase],
    *,
    seed: int = 0,
) -> tuple[Sounds, int]:
    """Say the phrases with Orpheus' sampling; returns the sounds, and how many ended by the end-of-speech token."""
    sounds, ended = [], 0
    for i, phrase in enumerate(phrases):
        asked = torch.tensor([prompt_ids(tokenizer, phrase.prompt)])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + i)
            written = net.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=7 * MAX_FRAMES)
        answer = written[0, asked.shape[1] :].tolist()
        ended += answer[-1] == custom(END_OF_SPEECH)
        sounds.append(_sound(codec_net, answer))
    return sounds, ended


def _sound(codec_net: nn.Module, answer: Sequence[int]) -> NDArray[np.float32]:
    frames = frames_of(answer)
    if len(frames) == 0:
        return np.zeros(corpus.FRAME_SAMPLES, dtype=np.float32)
    return codec.decode(codec_net, frames).numpy()
