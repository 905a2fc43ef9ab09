"""The picture that is being drawn: its latents, where in time they are, and the contexts that say where they go next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.errors import IntegrityError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.flow import euler_step, guide, timesteps
from kvlab.models.bagel.plan import CFG_IMG, CFG_TEXT, MAIN, MARKERS, Plan
from kvlab.models.bagel.settings import Drawing
from kvlab.spec import Block, WalkInputs


class Canvas:
    """One request's latents between evaluations, in float32.

    Args:
        drawing: How it is drawn.
        grid: Rows and columns of latent tokens.
        latents: The start noise, [tokens, latent_width].
    """

    def __init__(self, drawing: Drawing, grid: tuple[int, int], latents: Tensor) -> None:
        self.drawing, self.grid, self.latents = drawing, grid, latents
        self.times = timesteps(drawing.num_timesteps, drawing.timestep_shift)
        self.step_index = 0

    @classmethod
    def of(cls, plan: Plan, config: BagelConfig, device: torch.device) -> Canvas | None:
        """Return the canvas that a request starts on, None where the answer is words."""
        if plan.drawing is None or plan.start is None:
            return None
        grid = config.latent_grid(plan.drawing.height, plan.drawing.width)
        noise = plan.start.values((grid[0] * grid[1], config.latent_width))
        return cls(plan.drawing, grid, noise.to(device))

    @property
    def t(self) -> float:
        """How much of the picture is noise now, from 1 to 0."""
        return float(self.times[self.step_index])

    @property
    def is_done(self) -> bool:
        """True when nothing is noise any more."""
        return self.step_index == len(self.times) - 1

    def branches(self) -> tuple[str, ...]:
        """Labels of the contexts whose velocities the next step needs."""
        guidance = self.drawing.guidance
        if not guidance.is_active(self.t):
            return (MAIN,)
        return (MAIN, CFG_TEXT, CFG_IMG) if guidance.uses_pictures else (MAIN, CFG_TEXT)

    def inputs(self, plan: Plan) -> WalkInputs:
        """Return the inputs of the next evaluation: the same latents in every context, which are read and not written."""
        slots = self.grid[0] * self.grid[1] + MARKERS
        blocks = {label: Block(slots, 0, Branch(self, label)) for label in self.branches()}
        if CFG_TEXT in blocks:
            blocks[CFG_TEXT] = Block(slots, 0, Branch(self, CFG_TEXT), prefix=plan.without_latest_text())
        return WalkInputs({}, blocks=blocks)

    def combine(self, velocities: Mapping[str, Tensor]) -> Tensor:
        """Return the velocity to follow.

        Args:
            velocities: By label of the context, [tokens, latent_width] each; combined in float32 at least.

        Raises:
            IntegrityError: a context that guidance needs was not run.
        """
        missing = [label for label in self.branches() if label not in velocities]
        if missing:
            raise IntegrityError(
                f"t = {self.t:.3f} is guided and has no velocity of {', '.join(missing)}; run all its contexts"
            )
        exact = {label: v.to(torch.promote_types(v.dtype, self.latents.dtype)) for label, v in velocities.items()}
        if CFG_TEXT not in self.branches():
            return exact[MAIN]
        return guide(exact[MAIN], exact[CFG_TEXT], exact.get(CFG_IMG), self.drawing.guidance)

    def follow(self, velocity: Tensor) -> None:
        """Take one step along ``velocity``."""
        t, t_next = self.times[self.step_index], self.times[self.step_index + 1]
        self.latents = euler_step(self.latents, velocity, t, t_next)
        self.step_index += 1


@dataclass(frozen=True, eq=False)
class Branch:
    """One context's evaluation of a canvas."""

    canvas: Canvas
    label: str
