"""kvlab's own decoder of a token stream: every frame is heard, and no sample depends on how the stream was cut.

A frame's samples depend on ``reach_frames`` frames to either side and on nothing beyond. So each frame is decoded in a window
of its own, and a frame's window is a function of the stream alone:

    frames   0 1 2 3 4 5 6 7 8 9        reach 3
    window of frame 4:  1 2 3 [4] 5 6 7     of frame 9: 6 7 8 [9]     of frame 0: [0] 1 2 3

Streaming waits for ``reach_frames`` more frames or the end before it decodes one; decoding all at once runs the same windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvlab.errors import InputError
from kvlab.models.orpheus.noise import NoiseSource
from kvlab.models.orpheus.tokens import Frame, FrameReader


class FrameCodec(Protocol):
    """What streaming needs of a codec."""

    frame_samples: int
    reach_frames: int

    def decode(self, frames: Sequence[Frame], *, noise: NoiseSource | None, start_frame: int, heard: range) -> Tensor:
        """Return the samples of the frames ``heard``, in the context of ``frames``."""
        ...


class FrameDecoder:
    """Turns frames into samples as soon as these are certain.

    Args:
        codec: decodes windows.
        noise: by absolute place; the codec's default when None.
        window_frames: frames heard of one window; 1 costs most and waits least.
        overlap_frames: frames of context on either side; less than the codec's reach makes clicks at the seams.
    """

    def __init__(
        self,
        codec: FrameCodec,
        *,
        noise: NoiseSource | None = None,
        window_frames: int = 1,
        overlap_frames: int | None = None,
    ) -> None:
        if window_frames < 1:
            raise InputError(f"window_frames is {window_frames}; at least 1 frame must be heard of a window")
        self._codec, self._noise, self._heard = codec, noise, window_frames
        self._overlap = codec.reach_frames if overlap_frames is None else overlap_frames
        self._frames: list[Frame] = []  # from frame _first of the stream on
        self._first = 0
        self._next = 0  # frame of the stream that is heard next

    def push(self, frames: Iterable[Frame]) -> list[Tensor]:
        """Take frames; returns the samples of each window that is complete with them."""
        self._frames.extend(frames)
        ready = []
        while self._next + self._heard + self._overlap <= self._first + len(self._frames):
            ready.append(self._window(self._heard))
        return ready

    def finish(self) -> list[Tensor]:
        """The stream is over: returns the samples that waited for more context."""
        end, ready = self._first + len(self._frames), []
        while self._next < end:
            ready.append(self._window(min(self._heard, end - self._next)))
        return ready

    def skip(self, frames: Iterable[Frame]) -> None:
        """Take the frames a stream begins with as context only: they have been heard before."""
        self._frames.extend(frames)
        self._next = self._first + len(self._frames)
        self._drop_used()

    def _window(self, num_heard: int) -> Tensor:
        start = max(self._next - self._overlap, 0)
        context = self._frames[start - self._first : self._next + num_heard + self._overlap - self._first]
        heard = range(self._next - start, self._next - start + num_heard)
        samples = self._codec.decode(context, noise=self._noise, start_frame=start, heard=heard)
        self._next += num_heard
        self._drop_used()
        return samples

    def _drop_used(self) -> None:
        unused = max(self._next - self._overlap, 0) - self._first
        if unused > 0:
            del self._frames[:unused]
            self._first += unused


class SpeechDecoder:
    """From token ids to samples: a FrameReader and a FrameDecoder in a row.

    Args:
        reader: finds frames; its ``bad`` and ``num_left_over`` say what could not be read.
        decoder: makes samples of them.
    """

    def __init__(self, reader: FrameReader, decoder: FrameDecoder) -> None:
        self.reader, self._decoder = reader, decoder

    def push(self, token: int) -> list[Tensor]:
        """Take one token; returns the samples of each frame that became certain."""
        frames = self.reader.push(token)
        return self._decoder.push(frames) if frames else []

    def finish(self) -> list[Tensor]:
        """The stream is over: returns the samples that waited for more context."""
        return self._decoder.finish()

    def skip(self, tokens: Iterable[int]) -> None:
        """Take the tokens of what was heard before; reading goes on where they end."""
        self._decoder.skip([frame for token in tokens for frame in self.reader.push(token)])


def decode_frames(
    codec: FrameCodec,
    frames: Sequence[Frame],
    *,
    noise: NoiseSource | None = None,
    window_frames: int = 1,
    overlap_frames: int | None = None,
) -> Tensor:
    """Return the samples of a whole stream, each frame in its own window; arguments as FrameDecoder.

    Shapes:
        result: [frames * frame_samples] float32.
    """
    decoder = FrameDecoder(codec, noise=noise, window_frames=window_frames, overlap_frames=overlap_frames)
    parts = [*decoder.push(frames), *decoder.finish()]
    return torch.cat(parts) if parts else torch.zeros(0)


def to_int16(samples: Tensor) -> Tensor:
    """Return samples as 16-bit PCM, clipped, truncated toward zero.

    >>> to_int16(torch.tensor([-1.5, -0.5, 0.0, 1.0])).tolist()
    [-32767, -16383, 0, 32767]
    """
    return (samples.clamp(-1, 1) * 32767).to(torch.int16)
