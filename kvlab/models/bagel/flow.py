"""Flow matching as pure functions: the times of a drawing, one Euler step, and how guidance combines velocities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.errors import InputError

RENORMS = ("global", "channel", "text_channel")
EPSILON = 1e-8  # keeps a velocity of zeros from dividing by zero


@dataclass(frozen=True)
class Guidance:
    """How far a picture follows its text and the pictures given.

    ``interval``: active while low < t <= high. ``renorm``: what is kept as long as without guidance: "global" all values
    together, "channel" each token, "text_channel" each token before pictures guide; ``renorm_min`` is the least factor.

    Raises:
        InputError: An unknown renorm, or numbers that cannot be.
    """

    text_scale: float = 4.0
    img_scale: float = 1.0
    interval: tuple[float, float] = (0.4, 1.0)
    renorm: str = "global"
    renorm_min: float = 0.0

    def __post_init__(self) -> None:
        if self.renorm not in RENORMS:
            raise InputError(f"cfg_renorm is {self.renorm!r}; known are {', '.join(RENORMS)}")
        if not 0 <= self.renorm_min <= 1:
            raise InputError(f"cfg_renorm_min is {self.renorm_min!r}; give a number from 0 to 1")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise InputError(f"cfg_interval is {self.interval!r}; give (low, high) with 0 <= low <= high <= 1")

    @property
    def uses_text(self) -> bool:
        """True when some time may be guided at all; without text guidance that of pictures does nothing."""
        return self.text_scale > 1

    @property
    def uses_pictures(self) -> bool:
        """True when the context without pictures is needed too."""
        return self.uses_text and self.img_scale > 1

    def is_active(self, t: float) -> bool:
        """True when the evaluation at time ``t`` is guided."""
        return self.uses_text and self.interval[0] < t <= self.interval[1]


def timesteps(num_timesteps: int, shift: float) -> Tensor:
    """Return the times of a drawing from 1 (noise) to 0, [num_timesteps] float32; all but the last are evaluated.

    >>> timesteps(3, 3.0).tolist()
    [1.0, 0.75, 0.0]
    """
    if isinstance(num_timesteps, bool) or not isinstance(num_timesteps, int) or num_timesteps < 2:
        raise InputError(f"num_timesteps is {num_timesteps!r}; at least 2 points in time are needed for one step")
    if not shift > 0:
        raise InputError(f"timestep_shift is {shift!r}; give a number above 0")
    t = torch.linspace(1, 0, num_timesteps)
    return shift * t / (1 + (shift - 1) * t)


def euler_step(x: Tensor, velocity: Tensor, t: Tensor | float, t_next: Tensor | float) -> Tensor:
    """Return the latents at ``t_next`` of latents ``x`` at ``t``."""
    return x - velocity.to(x.dtype) * (t - t_next)


def guide(main: Tensor, cfg_text: Tensor, cfg_img: Tensor | None, guidance: Guidance) -> Tensor:
    """Combine the velocities of the contexts with everything, without the latest text and without pictures.

    Raises:
        InputError: Pictures guide and ``cfg_img`` is missing.

    Shapes:
        all: [tokens, latent_width].
    """
    if guidance.uses_pictures and cfg_img is None:
        raise InputError(f"cfg_img_scale {guidance.img_scale} needs the velocity of the context without pictures, cfg_img")
    guided = cfg_text + guidance.text_scale * (main - cfg_text)
    if guidance.renorm == "text_channel":
        guided = guided * _shrink(main, guided, guidance)
    if guidance.uses_pictures and cfg_img is not None:
        guided = cfg_img + guidance.img_scale * (guided - cfg_img)
    return guided if guidance.renorm == "text_channel" else guided * _shrink(main, guided, guidance)


def _shrink(main: Tensor, guided: Tensor, guidance: Guidance) -> Tensor:
    """Return the factor that makes ``guided`` as long as ``main``, never more than 1."""
    axes = (-2, -1) if guidance.renorm == "global" else (-1,)
    lengths = [torch.linalg.vector_norm(v, dim=axes, keepdim=True) for v in (main, guided)]
    return (lengths[0] / (lengths[1] + EPSILON)).clamp(min=guidance.renorm_min, max=1.0)
