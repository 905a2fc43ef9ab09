"""The stages from nothing to a checkpoint, each kept in the work folder and gone on with where it stopped."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass
from pathlib import Path

from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.network import BagelNet
from kvlab.train import loop
from kvlab.train.bagel import autoencoder, evaluate, flow, pool
from kvlab.train.bagel.vocabulary import Texts, make_tokenizer

log = logging.getLogger("kvlab.train")

NUM_EVENED = 512
NUM_WATCHED = 12
WATCH_SEED = 1


@dataclass(frozen=True)
class Plan:
    """How much of everything; as it stands about two hours of one core.

    The same plan gives the same checkpoint, however often the run was killed.
    """

    work: Path
    autoencoder_steps: int = 3000
    decoder_steps: int = 600
    edits: int = 12_000
    steps: int = 8000
    seed: int = 0


def train_autoencoder(plan: Plan) -> Autoencoder:
    """Return the trained autoencoder, its latents brought to one scale."""
    first = autoencoder.AutoencoderTask(seed=plan.seed)
    loop.train(first, plan.work / "autoencoder.pt", num_steps=plan.autoencoder_steps, seed=plan.seed)
    autoencoder.even_out(first.autoencoder, autoencoder.pictures(NUM_EVENED, random.Random(plan.seed)))
    second = autoencoder.DecoderTask(first.autoencoder)
    loop.train(second, plan.work / "decoder.pt", num_steps=plan.decoder_steps, seed=plan.seed)
    first.net.eval().requires_grad_(False)
    return first.autoencoder


def train_network(plan: Plan, made: Autoencoder) -> BagelNet:
    """Return the network trained on an autoencoder's latents: the average of its weights."""
    texts = Texts(make_tokenizer())
    pictures = pool.kept(plan.work / "latents.pt", made, plan.edits, seed=plan.seed)

    def watch(net: BagelNet) -> str:
        return json.dumps(evaluate.glance(evaluate.Examiner(net, made, texts, WATCH_SEED), NUM_WATCHED))

    task = flow.FlowTask(pictures, texts, watch=watch, seed=plan.seed)
    loop.train(task, plan.work / "network.pt", num_steps=plan.steps, schedule=flow.flat_then_cosine, seed=plan.seed)
    net: BagelNet = task.ema.eval()
    return net
