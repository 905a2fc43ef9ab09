"""``kvlab bench bagel``: how soon a picture begins and is done, cold and after a hit, and what pages cost while it is drawn.

On one thread; what counts is the time that its core worked, so that neighbours on the machine do not slow it. The reference of
the denoise steps is the same network on contiguous K and V, without pages and without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

from kvlab.assemble import build_engine
from kvlab.bench.orpheus import one_thread
from kvlab.bench.rows import Row, document, interleave
from kvlab.engine.engine import Engine
from kvlab.engine.request import GenerationResult
from kvlab.errors import InputError
from kvlab.events import StepRan
from kvlab.models.bagel.attending import ContiguousAttention, ContiguousRow
from kvlab.models.bagel.flow import euler_step, guide, timesteps
from kvlab.models.bagel.network import BagelNet, gen_mask
from kvlab.models.bagel.plan import Plan
from kvlab.models.loading import load_model
from kvlab.spec import ask, draw

PROMPT = "a red circle left of a blue square on a white background"
QUESTIONS = ("how many circles?", "what colour is the square?")
PAGE_SIZE = 4  # a caption is some 20 tokens
NUM_PAGES = 512
SEED = 0


def run(model: str | Path = "bagel-tiny", *, rounds: int = 5, num_timesteps: int = 50) -> dict[str, Any]:
    """Measure and return {"rows": ..., "machine": ...}.

    Args:
        model: Name or path of a BAGEL model.
        rounds: Repetitions of each measurement.
        num_timesteps: Points of the noise schedule; one less is the number of denoise steps.
    """
    loaded: Any = load_model(model)
    if not hasattr(loaded, "net") or not isinstance(loaded.net, BagelNet):
        raise InputError(f"{loaded.name} draws no pictures; bench a BAGEL model")
    with one_thread(), _engine(loaded) as engine:
        rows = [
            *_cold_and_hit(engine, rounds, num_timesteps),
            _denoising(engine, loaded, rounds, num_timesteps),
            _served_picture(engine, num_timesteps),
        ]
        return document(rows, model=loaded.identity, threads=1, num_timesteps=num_timesteps)


@contextmanager
def _engine(model: Any) -> Iterator[Engine]:
    with build_engine(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, clock=process_time) as engine:
        yield engine


def _cold_and_hit(engine: Engine, rounds: int, num_timesteps: int) -> list[Row]:
    """Milliseconds to the first denoise step, and to the whole picture, after a hit against cold."""
    prompt = draw(PROMPT, num_timesteps=num_timesteps)
    times: dict[str, list[float]] = {"hit": [], "cold": []}

    def one(name: str) -> float:
        result = engine.generate(prompt, seed=SEED)
        if (result.cached_tokens > 0) is not (name == "hit"):
            raise InputError(f"a {name} picture found {result.cached_tokens} slots cached; the bench measures nothing")
        times[name].append(result.first_pass_ms or 0.0)
        return result.total_ms

    def cold() -> float:
        engine.reset_prefix_cache()
        return one("cold")

    def hit() -> float:
        engine.generate(prompt, max_tokens=0)
        return one("hit")

    hits, colds = interleave(hit, cold, rounds)
    first_hits, first_colds = (times[name][-rounds:] for name in ("hit", "cold"))  # the warm-up's are left out
    return [
        Row.of("first_step_hit_vs_cold", first_hits, first_colds, target=1.05, unit="ms"),
        Row.of("picture_hit_vs_cold", hits, colds, target=1.05, unit="ms"),
    ]


def _served_picture(engine: Engine, num_timesteps: int) -> Row:
    """Encoder calls for a picture that an earlier question has shown."""
    picture = engine.generate(draw(PROMPT, num_timesteps=num_timesteps), seed=SEED).image
    first, second = (engine.generate(ask(picture, question), max_tokens=2) for question in QUESTIONS)
    if not first.encoder_calls or not second.cached_tokens:
        raise InputError(
            f"the first question made {first.encoder_calls} encoder calls and the second found {second.cached_tokens} slots "
            "cached; the bench measures nothing"
        )
    return Row.of("served_picture_encoder_calls", [float(second.encoder_calls)], target=0.0, unit="calls")


# -- denoise steps -----------------------------------------------------------------------------------------------------


def _denoising(engine: Engine, model: Any, rounds: int, num_timesteps: int) -> Row:
    """Denoise steps a second from pages, through the engine, against the network on contiguous K and V."""
    prompt = draw(PROMPT, num_timesteps=num_timesteps)
    plan: Plan = model.processor.process_prompt(prompt, {"seed": SEED}).metadata["plan"]
    contiguous = ContiguousDrawing(model.net, plan)

    def paged() -> float:
        return steps_per_s(engine, engine.generate(prompt, seed=SEED))

    ours, theirs = interleave(paged, contiguous.steps_per_s, rounds)
    return Row.of("denoise_steps_vs_contiguous", ours, theirs, target=0.9, unit="steps/s", higher_is_better=True)


def steps_per_s(engine: Engine, result: GenerationResult) -> float:
    """Return the rate of a request's denoise steps, from the end of the first to the end of the last."""
    ends = [
        e.at_ms
        for e in engine.events
        if isinstance(e.event, StepRan) and e.event.walk == "image_gen" and e.event.spans[0][0] == result.rid
    ]
    return (len(ends) - 1) / (ends[-1] - ends[0]) * 1e3


class ContiguousDrawing:
    """One text drawn by the network alone: K and V of each context end to end in memory."""

    def __init__(self, net: BagelNet, plan: Plan) -> None:
        if plan.drawing is None or plan.start is None:
            raise InputError("a plan that draws nothing; give that of a prompt made by kvlab.draw")
        self._net, self._drawing = net, plan.drawing
        self._grid = net.config.latent_grid(plan.drawing.height, plan.drawing.width)
        self._num_latents = self._grid[0] * self._grid[1]
        self._start = plan.start.values([self._num_latents, net.config.latent_width])
        self._num_tokens = plan.slots()
        self._kv = ContiguousAttention(net.config.text, capacity=self._num_tokens + self._num_latents + 2, dtype=net.dtype)
        self._prefill(plan.tensors()["tokens"])

    @torch.inference_mode()
    def _prefill(self, ids: list[int]) -> None:
        self._kv.begin([ContiguousRow("main", len(ids))])
        self._net.decode(self._net.embed_text(ids), torch.arange(len(ids)), self._kv)
        self._kv.finish()

    @torch.inference_mode()
    def latents(self, ends_s: list[float] | None = None) -> Tensor:
        """Return the latents that the picture ends as; ``ends_s`` is told when each step is done."""
        x = self._start
        times = timesteps(self._drawing.num_timesteps, self._drawing.timestep_shift).tolist()
        for t, t_next in pairwise(times):
            x = euler_step(x, self._velocity(x, t), t, t_next)
            if ends_s is not None:
                ends_s.append(process_time())
        return x

    def _velocity(self, x: Tensor, t: float) -> Tensor:
        """Guided velocities; without the latest text there is no context at all."""
        guidance = self._drawing.guidance
        streams = {"main": self._num_tokens, "cfg_text": 0} if guidance.is_active(t) else {"main": self._num_tokens}
        block = self._net.between_markers(self._net.embed_latents(x, self._grid, t))  # [latents + 2, hidden_size]
        slots = len(block)
        positions = torch.tensor([position for position in streams.values() for _ in range(slots)])
        self._kv.begin([ContiguousRow(name, slots) for name in streams], causal=False, commit=False)
        is_gen = gen_mask(slots - 2).repeat(len(streams))
        hidden = self._net.decode(block.repeat(len(streams), 1), positions, self._kv, is_gen=is_gen)
        velocities = self._net.velocity(hidden.view(len(streams), slots, -1)[:, 1:-1])  # [streams, latents, latent_width]
        return guide(velocities[0], velocities[1], None, guidance) if len(streams) > 1 else velocities[0]

    def steps_per_s(self) -> float:
        """Return the rate of denoise steps, from the end of the first to the end of the last."""
        ends_s: list[float] = []
        self.latents(ends_s)
        return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
