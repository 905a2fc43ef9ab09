"""The training of everything but the autoencoder: velocities of latents, and the words of answers."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.network import BagelNet
from kvlab.train.bagel import forward, lessons, network, packing, quick
from kvlab.train.bagel.packing import Packed
from kvlab.train.bagel.pool import Pool
from kvlab.train.bagel.probe import PatchProbe
from kvlab.train.bagel.vocabulary import Texts
from kvlab.train.loop import mixed_precision

log = logging.getLogger("kvlab.train")

PEAK_LR = 1e-3
WARM_UP_STEPS = 100
FLAT_SHARE = 0.4
EMA_DECAY = 0.998
WATCH_EVERY_STEPS = 1000
WEIGHTS = {"draw": 1.0, "edit": 1.0, "words": 1.0, "patches": 0.5}
#: Times are sigmoids of normals, moved towards noise: there it is settled what a picture shows.
TIME_MOVED = 0.5
#: How much more a latent token counts that an edit changes, and what change makes it count in full.
CHANGE_WEIGHT, FULL_CHANGE = 2.0, 0.2


def flat_then_cosine(step_index: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: a rise, a plateau, then half a cosine to zero.

    >>> [round(flat_then_cosine(i, 8000), 2) for i in (0, 3000, 5600, 7999)]
    [0.01, 1.0, 0.5, 0.0]
    """
    rise = min(1.0, (step_index + 1) / min(WARM_UP_STEPS, num_steps))
    done = max(0.0, (step_index / num_steps - FLAT_SHARE) / (1 - FLAT_SHARE))
    return rise * 0.5 * (1 + math.cos(math.pi * done))


class FlowTask:
    """Trains the network on a pool; see ``kvlab.train.loop.Task``. ``ema`` is the average that is kept."""

    name = "flow"
    peak_lr = PEAK_LR

    def __init__(
        self,
        pool: Pool,
        texts: Texts,
        *,
        config: BagelConfig = network.CONFIG,
        counts: Mapping[str, int] = lessons.COUNTS,
        watch: Callable[[BagelNet], Any] | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.net: Any = network.build(config)
        quick.speed_up(self.net)
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.probe = PatchProbe(self.net)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
            {"params": list(self.probe.parameters()), "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
        self.pool, self.teacher, self.counts, self.watch = pool, lessons.Teacher(pool, texts), counts, watch

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """Return the terms over fresh requests of every kind."""
        draw = random.Random(int(torch.randint(2**31, ())))
        made = {kind: self.teacher.lessons(kind, num, draw) for kind, num in self.counts.items()}
        groups = [[one for kind in group for one in made[kind]] for group in lessons.GROUPS]
        packed = packing.pack(groups, num_latents=network.NUM_LATENTS, num_patches=network.NUM_PATCHES)
        pictures, words = self._errors(packed)
        start, end = self.counts["draw"], self.counts["draw"] + self.counts["edit"]
        edited = pictures[start:end] * self._importance(packed.pictures["made"][start:end])
        drawn = torch.cat([pictures[:start], pictures[end:]])
        patches = self.probe.nats([self.pool.drawing(i) for i in packed.pictures["vit"].tolist()])
        found = {"draw": drawn, "edit": edited, "words": words, "patches": patches}
        return {name: WEIGHTS[name] * error.mean() for name, error in found.items()}

    def _errors(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Return the squared errors of the velocities, [pictures, latent tokens], and the nats of the answers' words."""
        made, said = packed.pictures["made"], packed.labels != packing.IGNORED
        clean, t = self.pool.latents(made), torch.sigmoid(torch.randn(len(made)) + TIME_MOVED)
        noise = torch.randn_like(clean)
        with mixed_precision():
            x = forward.embed(self.net, packed, *self._given(packed))
            noisy = self.net.embed_latents(torch.lerp(clean, noise, t[:, None, None]), network.LATENT_GRID, t)
            hidden = forward.decode(self.net, packed, forward.put(x, packed.slots["made"], noisy))
            velocity = self.net.velocity(hidden[packed.slots["made"]]).view_as(clean).float()
            logits = self.net.logits(hidden[said])
        errors = (velocity - (noise - clean)).square().mean(-1)
        return errors, F.cross_entropy(logits, packed.labels[said], reduction="none")

    def _given(self, packed: Packed) -> tuple[Tensor, Tensor]:
        return self.pool.latents(packed.pictures["vae"]), self.pool.seen(packed.pictures["vit"])

    def _importance(self, made: Tensor) -> Tensor:
        """Return the weights of the latent tokens of edits' ends, [pictures, latent tokens]; 1 on the mean."""
        change = (self.pool.mean[made].float() - self.pool.mean[made - 1].float()).square().mean(-1)
        weights = 1 + CHANGE_WEIGHT * (change / FULL_CHANGE).clamp(max=1)
        return weights / weights.mean()

    @torch.no_grad()
    def after(self, step_index: int) -> None:
        """Follow the weights with the average; quickly at first."""
        decay = min(EMA_DECAY, (1 + step_index) / (10 + step_index))
        for kept, new in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            kept.lerp_(new, 1 - decay)
        if self.watch is not None and (step_index + 1) % WATCH_EVERY_STEPS == 0:
            log.info("%s %d: %s", self.name, step_index + 1, self.watch(self.ema))

    def state(self) -> dict[str, Any]:
        """The average and the probe."""
        return {"ema": self.ema.state_dict(), "probe": self.probe.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the average and the probe."""
        self.ema.load_state_dict(state["ema"])
        self.probe.load_state_dict(state["probe"])
