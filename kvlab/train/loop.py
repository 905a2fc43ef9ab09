"""A training run that can be killed at any step: one cosine to zero, its whole state in one file."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from kvlab.models.loading import cpu_has_bfloat16

log = logging.getLogger("kvlab.train")

SAVE_EVERY_S = 120.0
REPORT_EVERY_STEPS = 25
WARM_UP_STEPS = 50
CLIP_NORM = 1.0


def mixed_precision() -> torch.autocast:
    """Return a context in bfloat16 where this CPU multiplies in it; where it does not, emulating it is ten times slower."""
    return torch.autocast("cpu", torch.bfloat16, enabled=cpu_has_bfloat16())


class Task(Protocol):
    """What is trained. Everything it draws in a step comes from torch's generator, which the loop seeds by the step."""

    name: str
    net: nn.Module
    optimizer: torch.optim.Optimizer
    peak_lr: float

    def losses(self, step_index: int) -> Mapping[str, Tensor]:
        """Return the terms whose sum is minimised in this step."""

    def after(self, step_index: int) -> None:
        """Do what follows the optimizer's step."""

    def state(self) -> dict[str, Any]:
        """Return what lives outside ``net`` and ``optimizer``."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state`` returned."""


#: (step_index, num_steps) -> the share of the peak learning rate.
Schedule: TypeAlias = Callable[[int, int], float]


def cosine(step_index: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: a short rise, then half a cosine to zero.

    >>> round(cosine(2000, 4000), 2), round(cosine(3999, 4000), 5)
    (0.5, 0.0)
    """
    rise = min(1.0, (step_index + 1) / min(WARM_UP_STEPS, num_steps))
    return rise * 0.5 * (1 + math.cos(math.pi * step_index / num_steps))


def train(
    task: Task,
    path: Path,
    *,
    num_steps: int,
    schedule: Schedule = cosine,
    seed: int = 0,
    save_every_s: float = SAVE_EVERY_S,
) -> dict[str, float]:
    """Train up to ``num_steps``, from where ``path`` left off if it is there; returns the means of the last terms.

    A run killed and started again takes the same steps as one that was not.

    Changes:
        The task, and ``path``, which holds the state of the last step at the end.
    """
    step = resume(task, path)
    means: dict[str, float] = {}
    saved_s = reported_s = time.monotonic()
    while step < num_steps:
        torch.manual_seed(seed * 1_000_003 + step)
        _set_lr(task, schedule(step, num_steps))
        terms = _step(task, step)
        step += 1
        means = {name: 0.9 * means.get(name, value) + 0.1 * value for name, value in terms.items()}
        if step % REPORT_EVERY_STEPS == 0:
            reported_s = _report(task, step, num_steps, means, reported_s)
        if time.monotonic() - saved_s > save_every_s:
            save(task, path, step)
            saved_s = time.monotonic()
    save(task, path, step)
    return means


def _set_lr(task: Task, share: float) -> None:
    for group in task.optimizer.param_groups:
        group["lr"] = task.peak_lr * share


def _step(task: Task, step: int) -> dict[str, float]:
    terms = task.losses(step)
    task.optimizer.zero_grad(set_to_none=True)
    sum(terms.values(), torch.zeros(())).backward()
    nn.utils.clip_grad_norm_(task.net.parameters(), CLIP_NORM)
    task.optimizer.step()
    task.after(step)
    return {name: value.item() for name, value in terms.items()}


def _report(task: Task, step: int, num_steps: int, means: Mapping[str, float], reported_s: float) -> float:
    now = time.monotonic()
    terms = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
    each_s = (now - reported_s) / REPORT_EVERY_STEPS
    log.info("%s %d/%d  %s  %.2f s a step, cpu %.0f s", task.name, step, num_steps, terms, each_s, time.process_time())
    return now


def save(task: Task, path: Path, step_index: int) -> None:
    """Write the state after ``step_index`` steps in place of the last."""
    state = {
        "step_index": step_index,
        "net": task.net.state_dict(),
        "optimizer": task.optimizer.state_dict(),
        "task": task.state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def resume(task: Task, path: Path) -> int:
    """Give the task the state in ``path``; returns the number of steps done, 0 without a file."""
    if not path.is_file():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    task.net.load_state_dict(state["net"])
    task.optimizer.load_state_dict(state["optimizer"])
    task.restore(state["task"])
    return int(state["step_index"])
