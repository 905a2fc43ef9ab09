"""The network over packed requests at once, without pages: what training and its judge run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.models.bagel.network import BagelNet
from kvlab.train.bagel.network import LATENT_GRID
from kvlab.train.bagel.packing import Packed


class GroupedAttention:
    """Attention inside each request of packed groups, as plain products: for short requests quicker than a fused kernel.

    It records gradients, and takes the place of pages in ``BagelNet.decode``.
    """

    def __init__(self, masks: Sequence[Tensor]) -> None:
        self._biases = [torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf) for mask in masks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [bias.shape[0] * bias.shape[1] for bias in self._biases]
        groups = zip(q.split(sizes), k.split(sizes), v.split(sizes), self._biases, strict=True)
        return torch.cat([_attend(*group) for group in groups])


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return what the tokens of rows have seen, [rows * length, heads, head_dim]; ``bias`` is [rows, length, length]."""
    num_rows, length = bias.shape[:2]
    num_kv_heads = k.shape[1]
    q = q.view(num_rows, length, num_kv_heads, -1, q.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = (x.view(num_rows, length, num_kv_heads, -1).transpose(1, 2) for x in (k, v))  # [rows, kv_heads, length, head_dim]
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5  # [rows, kv_heads, share * length, length]
    seen = (scores.unflatten(2, (-1, length)) + bias[:, None, None]).softmax(-1).to(v.dtype)
    out = (seen.flatten(2, 3) @ v).unflatten(2, (-1, length))  # [rows, kv_heads, share, length, head_dim]
    return out.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)


def embed(net: BagelNet, packed: Packed, context: Tensor | None, seen: Tensor | None) -> Tensor:
    """Return the embeddings of texts, markers and the pictures given; those of latents being drawn are still to come.

    Shapes:
        context: [pictures, latent tokens, latent_width], of the "vae" blocks; seen: [pictures, 3, height, width], of the
            "vit" blocks; result: [tokens, hidden_size].
    """
    x = net.embed_text(packed.ids)
    if context is not None and len(context):
        x = put(x, packed.slots["vae"], net.embed_latents(context, LATENT_GRID, torch.zeros(len(context))))
    if seen is not None and len(seen):
        x = put(x, packed.slots["vit"], net.embed_picture(seen))
    return x


def put(x: Tensor, slots: Tensor, block: Tensor) -> Tensor:
    """Return ``x`` with the tokens of pictures in their places."""
    return x.index_copy(0, slots, block.flatten(0, 1).to(x.dtype))


def decode(net: BagelNet, packed: Packed, x: Tensor) -> Tensor:
    """Return the hidden states of packed requests, [tokens, hidden_size]."""
    return net.decode(x, packed.positions, GroupedAttention(packed.masks), is_gen=packed.is_gen)


def velocities(net: BagelNet, packed: Packed, x: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
    """Return the velocities of latents being drawn, at one time a picture.

    Shapes:
        x: from ``embed``; noisy and result: [pictures, latent tokens, latent_width]; t: [pictures].
    """
    hidden = decode(net, packed, put(x, packed.slots["made"], net.embed_latents(noisy, LATENT_GRID, t)))
    return net.velocity(hidden[packed.slots["made"]]).view_as(noisy)
