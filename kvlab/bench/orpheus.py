"""``kvlab bench orpheus``: how soon sound comes, cold and after a hit, whether speech outruns real time, and memory.

On one thread; what counts is the time that its core worked, so that neighbours on the machine do not slow it. The long
stream is one utterance's tokens again and again through the stream decoder.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Any

import torch

from kvlab.assemble import load
from kvlab.bench.index import resident_bytes
from kvlab.bench.rows import Row, document, interleave
from kvlab.engine.engine import Engine
from kvlab.errors import InputError
from kvlab.models.orpheus.sound import Speech
from kvlab.models.orpheus.spec import OrpheusModel
from kvlab.models.orpheus.speech import FrameDecoder, SpeechDecoder
from kvlab.models.orpheus.stream import say, speak
from kvlab.models.orpheus.tokens import SLOTS, FrameReader
from kvlab.progress import progress

SENTENCES = ("the blue circle and the red star", "the green square is above the white star", "seven two nine")
ASK: dict[str, Any] = {"only_speech": True, "seed": 0}
PAGE_SIZE = 4  # a sentence is some 26 tokens
MIB = 1 << 20
MAX_GROWTH_MIB = 8  # of the process, over a stream of which every sample takes 29 MB


def run(model: str | Path = "orpheus-tiny", *, rounds: int = 5, minutes: float = 10.0) -> dict[str, Any]:
    """Measure and return {"rows": ..., "machine": ...}.

    Args:
        model: Name or path of an Orpheus model.
        rounds: Repetitions of each measurement.
        minutes: Length of the long stream.
    """
    with one_thread(), load(model, page_size=PAGE_SIZE, record=False) as engine:
        if not isinstance(engine.model, OrpheusModel):
            raise InputError(f"{engine.model.name} does not speak; bench an Orpheus model")
        speech = say(engine, SENTENCES[0], max_tokens=40 * SLOTS, **ASK)
        rows = [
            _first_sound(engine, rounds),
            _generation(engine, rounds),
            _decoding(engine.model, speech, rounds),
            _memory(engine.model, speech, minutes),
        ]
        return document(rows, model=engine.model.identity, threads=1, long_stream_minutes=minutes)


def _first_sound(engine: Engine, rounds: int) -> Row:
    """Milliseconds to the first samples after a hit, against those of a cold start."""

    def first_ms() -> float:
        begin = process_time()
        for _ in speak(engine, SENTENCES[0], max_tokens=8 * SLOTS, ignore_eos=True, **ASK):
            break
        return (process_time() - begin) * 1e3

    def cold_ms() -> float:
        engine.reset_prefix_cache()
        return first_ms()

    def hit_ms() -> float:
        engine.generate(SENTENCES[0], max_tokens=0)
        return first_ms()

    hits, colds = interleave(hit_ms, cold_ms, rounds)
    return Row.of("first_sound_hit_vs_cold", hits, colds, target=1.1, unit="ms")


def _generation(engine: Engine, rounds: int) -> Row:
    """Seconds of sound for a second of one core, tokens and samples together."""
    rates = []
    for sentence in islice(cycle(SENTENCES), rounds):
        begin = process_time()
        speech = say(engine, sentence, max_tokens=40 * SLOTS, ignore_eos=True, **ASK)
        rates.append(speech.duration_s / (process_time() - begin))
    return Row.of("audio_s_per_s", rates, target=1.0, unit="s/s", higher_is_better=True)


def _decoding(model: OrpheusModel, speech: Speech, rounds: int) -> Row:
    """The same of the codec alone, frame by frame, against decoding all of it in one go."""

    def rate(decode: Any) -> float:
        begin = process_time()
        decode(speech.frames)
        return speech.duration_s / (process_time() - begin)

    ours, at_once = interleave(lambda: rate(model.sound), lambda: rate(model.codec.decode), rounds)
    return Row.of("codec_s_per_s_vs_one_go", ours, at_once, target=0.3, unit="s/s", higher_is_better=True)


def _memory(model: OrpheusModel, speech: Speech, minutes: float) -> Row:
    """MiB that a process grows by from the first tenth of a long stream to its end."""
    num_frames = int(minutes * 60 * model.codec.sample_rate / model.codec.frame_samples)
    decoder = SpeechDecoder(FrameReader(model.ids), FrameDecoder(model.codec))
    before = 0
    for index, frame in enumerate(progress(list(islice(cycle(speech.frames), num_frames)), "a long stream", unit="frame")):
        for slot, code in enumerate(frame):
            decoder.push(model.ids.audio_id(slot, code))
        if index == num_frames // 10:
            gc.collect()
            before = resident_bytes()
    decoder.finish()
    gc.collect()
    return Row.of("long_stream_growth", [(resident_bytes() - before) / MIB], target=MAX_GROWTH_MIB, unit="MiB")


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes on one thread: on several, a small model's threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
