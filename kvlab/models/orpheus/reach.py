"""Which part of a layer's input each part of its output depends on: what must be computed to hear a few samples, and no more.

Ranges are half-open and count in the rate of their own layer. A convolution that is padded to keep its length looks ``reach``
places to either side; a transposed one multiplies the rate. All others look at one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Op:
    """One layer of the decoder: the module, how far it looks to either side, and by how much it raises the rate.

    ``noise_stage`` numbers the layers that add noise.
    """

    module: Any
    reach: int = 0
    stride: int = 1
    padding: int = 0
    noise_stage: int | None = None

    def needs(self, wanted: range, length: int) -> range:
        """Return the part of an input of ``length`` places that the ``wanted`` part of the output depends on.

        >>> Op(None, reach=3).needs(range(0, 4), 10), Op(None, stride=8, padding=4).needs(range(16, 24), 10)
        (range(0, 7), range(1, 4))
        """
        if self.stride == 1:
            return range(max(wanted.start - self.reach, 0), min(wanted.stop + self.reach, length))
        # output o sums the inputs i with 0 <= o - i * stride + padding < 2 * stride
        first = -((2 * self.stride - 1 - self.padding - wanted.start) // self.stride)
        return range(max(first, 0), min((wanted.stop - 1 + self.padding) // self.stride + 1, length))


def plan(ops: Sequence[Op], wanted: range, num_latents: int) -> list[range]:
    """Return the input range of each op, and last of all ``wanted``, the output range."""
    lengths = list(_lengths(ops, num_latents))
    ranges = [wanted]
    for op, length in zip(reversed(ops), reversed(lengths), strict=True):
        ranges.append(op.needs(ranges[-1], length))
    return ranges[::-1]


def _lengths(ops: Sequence[Op], num_latents: int) -> Iterator[int]:
    length = num_latents
    for op in ops:
        yield length
        length *= op.stride


def reach_latents(ops: Sequence[Op]) -> int:
    """Return how many latents to either side of its own a sample may depend on: the wider of the two sides."""
    rate = 1
    for op in ops:
        rate *= op.stride
    here = 1 << 20  # far from both ends
    first = plan(ops, range(here * rate, (here + 1) * rate), 2 * here)[0]
    return max(here - first.start, first.stop - here - 1)
