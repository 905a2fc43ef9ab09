"""Speech as it is generated: chunks of sound out of a running engine, several voices side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import EllipsisType
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from kvlab.errors import InputError
from kvlab.models.orpheus.noise import NoiseSource
from kvlab.models.orpheus.official import OfficialDecoder
from kvlab.models.orpheus.prompts import OrpheusProcessor
from kvlab.models.orpheus.sound import AudioChunk, Speech
from kvlab.models.orpheus.spec import OrpheusModel
from kvlab.models.orpheus.speech import FrameDecoder, SpeechDecoder, to_int16
from kvlab.models.orpheus.tokens import FrameReader, OnlySpeech, OrpheusIds, due_slot
from kvlab.spec import Continued

DECODERS = ("kvlab", "official")


class SpeakingEngine(Protocol):
    """An engine over an OrpheusModel."""

    model: Any

    def submit(self, prompt: Any, **options: Any) -> Any:
        """Queue a request; returns what has ``done``, ``outcome`` and ``cancel()``."""
        ...

    def step(self) -> int:
        """Advance every request."""
        ...


class TokenDecoder(Protocol):
    """From token ids to samples."""

    def push(self, token: int) -> list[Tensor]: ...

    def finish(self) -> list[Tensor]: ...

    def skip(self, tokens: Iterable[int]) -> None: ...


@dataclass(eq=False)
class SpeechStream:
    """One utterance as it comes: iterate for AudioChunks; leaving the loop early cancels it. Made by ``speak``.

    The request is in the engine from the start, so streams made one after another are generated side by side. Sound that was
    given out is not kept.
    """

    engine: SpeakingEngine
    text: str
    voice: str | None
    spoken_before: Sequence[int]
    decoder: TokenDecoder
    chunk_frames: int
    begin_s: float
    repeat_bad: bool = False  # frames that cannot be read are filled with the one before
    handle: Any = None
    arrived: deque[int] = field(default_factory=deque)
    done: bool = False  # every chunk was given out
    ttfa_ms: float | None = None
    total_ms: float = 0.0
    _waiting: list[Tensor] = field(default_factory=list)  # decoded, not given out
    _num_given: int = 0

    def __repr__(self) -> str:
        state = "done" if self.done else "in flight"
        return f"SpeechStream({self.voice}: {self.text[:40]!r}, {self._num_given} samples, {state})"

    @property
    def generation(self) -> Any:
        """The engine's result; None while tokens still come."""
        return self.handle.outcome

    def cancel(self) -> None:
        """End the request; sound that is complete can still be taken."""
        self.handle.cancel()

    def ready(self) -> Iterator[AudioChunk]:
        """Give out what can be heard without running the engine."""
        while self.arrived:
            self._waiting += self.decoder.push(self.arrived.popleft())
            if sum(map(len, self._waiting)) >= self.chunk_frames * self.engine.model.codec.frame_samples:
                yield self._chunk()
        if self.handle.done and not self.done:
            self._waiting += self.decoder.finish()
            if self._waiting:
                yield self._chunk()
            self.done = True

    def __iter__(self) -> Iterator[AudioChunk]:
        for _, chunk in together([self]):
            yield chunk
        if self.generation.error is not None:
            raise self.generation.error

    def _chunk(self) -> AudioChunk:
        samples = torch.cat([to_int16(x) if x.is_floating_point() else x for x in self._waiting]).numpy()
        chunk = AudioChunk(samples, self._num_given, self.engine.model.codec.sample_rate)
        self._waiting, self._num_given = [], self._num_given + len(samples)
        self.total_ms = (perf_counter() - self.begin_s) * 1e3
        self.ttfa_ms = self.total_ms if self.ttfa_ms is None else self.ttfa_ms
        return chunk


def speak(
    engine: SpeakingEngine,
    text: str | Sequence[int] | Continued,
    *,
    voice: str | EllipsisType | None = ...,
    chunk_frames: int = 1,
    decoder: str = "kvlab",
    noise: NoiseSource | None = None,
    repeat_bad: bool = False,
    only_speech: bool = False,
    **options: Any,
) -> SpeechStream:
    """Begin to say something.

    Args:
        engine: Runs an OrpheusModel.
        text: What to say; ids of a whole prompt; or a ``Speech.continued()``, whose sound goes on where that ended.
        voice: A name the checkpoint knows, or None for no name; the model's own default when not given. A whole prompt and
            an utterance that goes on have a voice in them already; none may be given with those.
        chunk_frames: Least number of frames in a chunk, but for the last one.
        decoder: "kvlab", or "official" for the released decoder with its faults.
        noise: Of the codec; seed 0's when None.
        repeat_bad: Fill the time of a frame that cannot be read with the one before.
        only_speech: Let only well-formed audio tokens be sampled.
        options: As ``Engine.submit``.

    Raises:
        InputError: an unknown voice or decoder, a voice where one is there already, an empty text, or what ``Engine.submit``
            refuses.
    """
    begin_s, model = perf_counter(), _speaking_model(engine)
    _check(chunk_frames, decoder, options)
    spoken = _spoken_before(text, model.ids)
    if decoder == "official":
        sound: TokenDecoder = OfficialDecoder(model.codec, noise, model.ids)
    else:
        sound = SpeechDecoder(FrameReader(model.ids, repeat_bad), FrameDecoder(model.codec, noise=noise))
    sound.skip(spoken)
    if only_speech:
        options["allowed"] = OnlySpeech(model.ids, due_slot(spoken, model.ids))
    if voice is not ...:
        options["fields"] = {**options.get("fields", {}), "voice": voice}
    named = _named(text, options.get("fields"), model)
    stream = SpeechStream(engine, _words(text), named, spoken, sound, chunk_frames, begin_s, repeat_bad)
    stream.handle = engine.submit(text, on_token=lambda chunk: stream.arrived.append(chunk.token), **options)
    return stream


def together(streams: Sequence[SpeechStream]) -> Iterator[tuple[int, AudioChunk]]:
    """Yield (index of the stream, chunk) of several utterances as they come; leaving the loop early cancels them all.

    A stream that fails ends alone; its ``generation.error`` says why.
    """
    try:
        while True:
            for index, stream in enumerate(streams):
                for chunk in stream.ready():
                    yield index, chunk
            running = [stream for stream in streams if not stream.done]
            if not running:
                return
            if not any(stream.handle.done for stream in running):
                running[0].engine.step()
    finally:
        for stream in streams:
            stream.cancel()


def collect(streams: Sequence[SpeechStream]) -> list[Speech]:
    """Run several utterances to their ends and return each one whole."""
    parts: list[list[np.ndarray]] = [[] for _ in streams]
    for index, chunk in together(streams):
        parts[index].append(chunk.samples)
    return [_whole(stream, chunks) for stream, chunks in zip(streams, parts, strict=True)]


def say(engine: SpeakingEngine, text: str | Sequence[int] | Continued, **how: Any) -> Speech:
    """Say something and return all of it; arguments and errors as ``speak``.

    Raises:
        Exception: what ended the request, if it did not end well.
    """
    (speech,) = collect([speak(engine, text, **how)])
    if speech.generation.error is not None:
        raise speech.generation.error
    return speech


def _whole(stream: SpeechStream, chunks: list[np.ndarray]) -> Speech:
    model: OrpheusModel = stream.engine.model
    reader = FrameReader(model.ids, stream.repeat_bad)
    for token in stream.spoken_before:
        reader.push(token)
    num_bad_before = len(reader.bad)
    frames = tuple(frame for token in stream.generation.ids for frame in reader.push(token))
    return Speech(
        text=stream.text,
        voice=stream.voice,
        samples=np.concatenate(chunks) if chunks else np.zeros(0, np.int16),
        sample_rate=model.codec.sample_rate,
        frames=frames,
        bad_frames=tuple(reader.bad[num_bad_before:]),
        left_over_tokens=reader.num_left_over,
        ignored_tokens=reader.num_ignored,
        ttfa_ms=stream.ttfa_ms,
        total_ms=stream.total_ms,
        generation=stream.generation,
    )


# -- reading the arguments ---------------------------------------------------------------------------------------------


def _speaking_model(engine: SpeakingEngine) -> OrpheusModel:
    model = engine.model
    if not isinstance(model, OrpheusModel):
        raise InputError(f"{getattr(model, 'name', model)} does not speak; load an Orpheus model, for example 'orpheus-tiny'")
    return model


def _check(chunk_frames: Any, decoder: str, options: dict[str, Any]) -> None:
    if isinstance(chunk_frames, bool) or not isinstance(chunk_frames, int) or chunk_frames < 1:
        raise InputError(f"chunk_frames is {chunk_frames!r}; it must be a whole number of at least 1")
    if decoder not in DECODERS:
        raise InputError(f"there is no decoder {decoder!r}; there are: {', '.join(DECODERS)}")
    if "on_token" in options:
        raise InputError("on_token is how speak takes the tokens itself; iterate over the stream, or use engine.submit")


def _spoken_before(text: Any, ids: OrpheusIds) -> list[int]:
    """The audio ids at the end of a continuation's prompt: those of the utterance that goes on."""
    if not isinstance(text, Continued) or text.text:
        return []
    kept = list(text.kept_ids)
    starts = [i for i, token in enumerate(kept) if token == ids.start_of_speech]
    return kept[starts[-1] + 1 :] if starts else []


def _words(text: Any) -> str:
    if isinstance(text, Continued):
        return text.text or "(goes on)"
    if isinstance(text, str):
        return text
    return f"({len(text)} ids)" if hasattr(text, "__len__") else repr(text)  # what is no prompt is refused on submission


def _named(text: Any, fields: Any, model: OrpheusModel) -> str | None:
    """Whose name the model's processor will write before the text; None where it writes none, as into a whole prompt."""
    words, processor = text.text if isinstance(text, Continued) else text, cast(OrpheusProcessor, model.processor)
    if not isinstance(words, str) or not words or processor.is_whole_prompt(words):
        return None
    given: Mapping[str, Any] = fields if isinstance(fields, Mapping) else {}
    named: str | None = given.get("voice", next(iter(model.voices), None))
    return named or None
