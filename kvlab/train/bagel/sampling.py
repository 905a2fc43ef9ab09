"""Pictures and answers from a network in hand, many requests at once and without pages: for watching and for judging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvlab.models.bagel.autoencoder import Autoencoder, to_uint8
from kvlab.models.bagel.flow import Guidance, euler_step, guide, timesteps
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.patches import unpatchify
from kvlab.train.bagel import forward, network, packing
from kvlab.train.bagel.packing import Packed, Part
from kvlab.train.bagel.scenes import Pixels
from kvlab.train.bagel.vocabulary import SPECIAL

NUM_TIMESTEPS = 25  # 24 steps
SHIFT = 3.0
#: As the release draws from texts, and as it edits.
OF_TEXT = Guidance(text_scale=4.0, img_scale=1.0, interval=(0.4, 1.0), renorm="global")
OF_PICTURES = Guidance(text_scale=4.0, img_scale=2.0, interval=(0.0, 1.0), renorm="text_channel")
MAX_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Given:
    """The pictures that requests refer to by number.

    Shapes:
        latents: [pictures, latent tokens, latent_width]; seen: [pictures, 3, height, width] for the vision tower.
    """

    latents: Tensor
    seen: Tensor


class _Branch:
    """One context of every request, before the latents being drawn."""

    def __init__(self, net: BagelNet, contexts: Sequence[Sequence[Part]], given: Given | None) -> None:
        self._net = net
        self._packed = _packed([[*context, Part("made", picture=i)] for i, context in enumerate(contexts)])
        self._x = _embedded(net, self._packed, given)

    def velocity(self, x: Tensor, t: float) -> Tensor:
        """Return the velocities at one time, [requests, latent tokens, latent_width]."""
        return forward.velocities(self._net, self._packed, self._x, x, torch.full((len(x),), t)).float()


def _packed(requests: Sequence[Sequence[Part]]) -> Packed:
    return packing.pack([requests], num_latents=network.NUM_LATENTS, num_patches=network.NUM_PATCHES)


def _embedded(net: BagelNet, packed: Packed, given: Given | None) -> Tensor:
    if given is None:
        return forward.embed(net, packed, None, None)
    return forward.embed(net, packed, given.latents[packed.pictures["vae"]], given.seen[packed.pictures["vit"]])


@torch.no_grad()
def draw(
    net: BagelNet, contexts: Sequence[Sequence[Part]], guidance: Guidance, *, seed: int, given: Given | None = None
) -> Tensor:
    """Return the latents drawn for requests: [requests, latent tokens, latent_width].

    A context's last text is what the text's guidance leaves out; its pictures what the pictures' guidance leaves out.
    """
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(len(contexts), network.NUM_LATENTS, network.CONFIG.latent_width, generator=noise)
    main = _Branch(net, contexts, given)
    cfg_text = _Branch(net, [context[:-1] for context in contexts], given)
    cfg_img = _Branch(net, [[part for part in context if part.kind == "text"] for context in contexts], None)
    times = timesteps(NUM_TIMESTEPS, SHIFT).tolist()
    for t, following in pairwise(times):
        velocity = main.velocity(x, t)
        if guidance.is_active(t):
            no_pictures = cfg_img.velocity(x, t) if guidance.uses_pictures else None
            velocity = guide(velocity, cfg_text.velocity(x, t), no_pictures, guidance)
        x = euler_step(x, velocity, t, following)
    return x


@torch.no_grad()
def decode(autoencoder: Autoencoder, latents: Tensor) -> list[Pixels]:
    """Return the pictures of latent tokens."""
    planes = unpatchify(latents, network.LATENT_GRID, network.CONFIG.latent_patch_size)
    return list(np.asarray(to_uint8(autoencoder.decode(planes))))


@torch.no_grad()
def answers(net: BagelNet, contexts: Sequence[Sequence[Part]], *, given: Given | None = None) -> list[list[int]]:
    """Return the likeliest answer to each request, without the ids around it."""
    said: list[list[int]] = [[] for _ in contexts]
    going = list(range(len(contexts)))
    for _ in range(MAX_ANSWER_TOKENS):
        packed = _packed([[*contexts[i], packing.open_answer(said[i])] for i in going])
        hidden = forward.decode(net, packed, _embedded(net, packed, given))
        ids = net.logits(hidden[packed.ends]).argmax(-1).tolist()
        for i, token in zip(going, ids, strict=True):
            said[i].append(token)
        going = [i for i in going if said[i][-1] != SPECIAL.eos]
        if not going:
            break
    return [ids[:-1] if ids[-1] == SPECIAL.eos else ids for ids in said]
