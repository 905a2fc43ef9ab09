"""Pictures, and how far two of them are apart, as frozen rows that views draw."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.errors import InputError
from kvlab.options import is_whole

FULL = 255  # the largest value of a channel
MAX_THRESHOLD = 64  # of 255: what a threshold slider ends at
FAR = 32  # of 255: what most people see at a glance, and the threshold of the published numbers


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture to be drawn: 8 bits of red, green and blue a pixel, row by row from the top.

    ``shrunk``: how many times larger, in each direction, the picture is that this one stands for.
    """

    name: str
    height: int
    width: int
    rgb: bytes
    shrunk: int = 1

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or len(self.rgb) != 3 * self.height * self.width:
            raise InputError(
                f"picture {self.name!r} of {self.height} x {self.width} pixels has {len(self.rgb)} bytes; give 3 a pixel"
            )

    def __repr__(self) -> str:
        return f"Picture({self.name}: {self.height} x {self.width} pixels)"


@dataclass(frozen=True, repr=False)
class DifferenceMap:
    """How far a second picture is from a first one: ``values[row][column]``, of 255, that of the channel furthest off.

    ``is_signed``: second minus first; else magnitudes. ``cell_px``: a value is the one furthest off of that many pixels
    squared, so that no pixel is lost where a large picture is drawn small.
    """

    name: str
    values: tuple[tuple[int, ...], ...]
    is_signed: bool = False
    cell_px: int = 1

    @property
    def max_abs(self) -> int:
        """The largest difference of any channel, of 255."""
        return max((abs(value) for row in self.values for value in row), default=0)

    def __repr__(self) -> str:
        size = f"{len(self.values)} x {len(self.values[0]) if self.values else 0}"
        return f"DifferenceMap({self.name}: {size}, up to {self.max_abs} of {FULL})"


@dataclass(frozen=True, repr=False)
class PixelDrift:
    """What differs between two pictures of one size.

    ``moved[d]`` counts the pixels whose channel furthest off is ``d`` of 255 off, so ``moved[0]`` are those that are equal.
    ``mean_abs``: the mean difference over all channels. ``psnr_db``: None where nothing differs.
    """

    height: int
    width: int
    moved: tuple[int, ...]
    mean_abs: float
    psnr_db: float | None
    name: str = ""

    @property
    def num_pixels(self) -> int:
        """Pixels of one picture."""
        return self.height * self.width

    @property
    def equal_pixels(self) -> int:
        """Pixels that are the same in every channel."""
        return self.moved[0]

    @property
    def is_equal(self) -> bool:
        """True when both pictures are the same, pixel for pixel."""
        return self.equal_pixels == self.num_pixels

    @property
    def max_abs(self) -> int:
        """The largest difference of any channel, of 255."""
        return max(d for d, pixels in enumerate(self.moved) if pixels)

    def share_over(self, threshold: int) -> float:
        """Return the share of pixels of which a channel differs by more than ``threshold`` of 255.

        >>> PixelDrift(1, 4, (2, 1, 1), 0.25, 50.0).share_over(1)
        0.25
        """
        if not is_whole(threshold) or not 0 <= threshold <= FULL:
            raise InputError(f"threshold is {threshold!r}; give a whole number from 0 to {FULL}")
        return sum(self.moved[threshold + 1 :]) / self.num_pixels

    @property
    def verdict(self) -> str:
        """One sentence with the numbers."""
        if self.is_equal:
            return f"all {self.num_pixels} pixels are equal"
        far = sum(self.moved[FAR + 1 :])
        beyond = f"{far} ({far / self.num_pixels:.2%}) by more than {FAR}" if far else f"none by more than {FAR}"
        apart = f"the others differ by up to {self.max_abs} of {FULL}"
        return f"{self.equal_pixels} of {self.num_pixels} pixels are equal, {apart}, {beyond}"

    def __repr__(self) -> str:
        return f"PixelDrift({self.verdict})"


@dataclass(frozen=True)
class PixelRow:
    """A picture drawn cold, after a hit, and cold again, and how far the last two are from the first.

    ``cached_tokens`` of the ``prompt_tokens`` slots of main were cached for the hit, over all labels ``cached_slots``.
    """

    name: str
    dtype: str
    num_timesteps: int
    is_guided: bool
    prompt_tokens: int
    cached_tokens: int
    cached_slots: int
    drift: PixelDrift
    again: PixelDrift


@dataclass(frozen=True)
class NoiseRow:
    """What noise that a study put on the cached K and V does to a picture drawn from them.

    Every value v of the cached pages became v * (1 + 2 ** ``log2_noise`` * g), g drawn from a normal distribution.
    """

    log2_noise: int
    cached_tokens: int
    drift: PixelDrift


@dataclass(frozen=True)
class SweepRow:
    """One seed of a sweep with ``reuse`` of guided prefill or without; slots are those of all labels together.

    ``prefill_ms`` runs from submission to the end of the last prefill step, ``total_ms`` to the end of the request.
    """

    seed: int
    reuse: bool
    prompt_slots: int
    computed_slots: int
    prefill_ms: float
    total_ms: float

    @property
    def prefill_share(self) -> float:
        """Prefill's share of the whole time."""
        return self.prefill_ms / self.total_ms if self.total_ms else 0.0
