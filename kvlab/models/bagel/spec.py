"""BagelModel: the network as the engine sees it, with the walks of every kind of request.

words        prefill_text and prefill_vit in the order written ; decode
a picture    prefill_text, prefill_vae and prefill_vit in the order written ; image_gen
with a plan  prefill_text (asking for thoughts), as above ; decode ; close_text ; image_gen
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvlab.attention.base import AttentionBackend
from kvlab.errors import InputError, KvlabError
from kvlab.models.bagel.attending import through_pages
from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8, to_uint8
from kvlab.models.bagel.canvas import Branch, Canvas
from kvlab.models.bagel.network import BagelNet, gen_mask
from kvlab.models.bagel.patches import patchify, unpatchify
from kvlab.models.bagel.plan import (
    CFG_IMG,
    CLOSE_TEXT,
    DECODE,
    DRAW,
    MAIN,
    SHOW_LATENTS,
    SHOW_PATCHES,
    TENSORS,
    WRITE_TEXT,
    PicturePass,
    Plan,
    closing,
)
from kvlab.models.bagel.prompting import BagelProcessor
from kvlab.models.bagel.resizing import resize, resized_size
from kvlab.models.text import decoder_layout, decoder_rope, weights_version
from kvlab.spec import KVLayout, Match, PrefixStream, PromptProcessor, PromptRecord, RowInputs, Walk, WalkInputs, drop_leading

logger = logging.getLogger("kvlab.models")

#: Tokens of an answer or of thoughts unless a request says otherwise, as released.
MAX_TOKENS = 512


class BagelModel:
    """A spec.ModelSpec of texts and pictures.

    Args:
        net: The network, filled.
        autoencoder: Turns pictures into latents and back.
        processor: Makes plans of prompts.
        name: What the user asked for.
        identity: One line that names the bytes of the weights.
        checkpoint_path: Folder the weights came from; None keeps the prefix cache shut unless a salt is given.
        pinned_sha256: One SHA-256 of all weight files, where it has been computed; spares reading them again.
    """

    def __init__(
        self,
        net: BagelNet,
        autoencoder: Autoencoder,
        processor: BagelProcessor,
        *,
        name: str,
        identity: str,
        checkpoint_path: str | None = None,
        pinned_sha256: str | None = None,
    ) -> None:
        self.net, self.autoencoder = net, autoencoder
        self.processor: PromptProcessor = processor
        self.name, self.identity = name, identity
        self.config = processor.config
        self.vocab_size, self.num_heads = self.config.text.vocab_size, self.config.text.num_heads
        self.max_seq_len = processor.max_seq_len
        self._preprocessing = processor.fingerprint()
        self.pinned_sha256 = pinned_sha256
        self.default_options = MappingProxyType({"max_tokens": min(MAX_TOKENS, self.max_seq_len // 2)})
        self._checkpoint_path = checkpoint_path

    def __repr__(self) -> str:
        return f"BagelModel({self.name}, {self.config.text.num_layers} layers, {self.net.dtype}, {self.net.device})"

    # -- what is declared ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Where the network computes, and where its pages belong."""
        return str(self.net.device)

    def walks(self) -> Mapping[str, Walk]:
        bos = self.config.special.bos
        walks = (
            Walk(WRITE_TEXT),
            Walk(SHOW_PATCHES, causal=False, encodes=True),
            Walk(SHOW_LATENTS, causal=False, encodes=True),
            Walk(DECODE, loops=True, samples=True, starts_with=bos),
            Walk(CLOSE_TEXT),
            Walk(DRAW, loops=True, commits=False, causal=False),
        )
        return {walk.name: walk for walk in walks}

    def kv_labels(self) -> Mapping[str, tuple[str, ...]]:
        return {"kv": (MAIN, CFG_IMG)}

    def prefix_key_streams(self) -> Mapping[str, Mapping[str, PrefixStream]]:
        shows = (SHOW_PATCHES, SHOW_LATENTS)
        main = PrefixStream(TENSORS[MAIN], walk=WRITE_TEXT, decode_walk=DECODE, layout_walks=shows, trims_guided=True)
        cfg_img = PrefixStream(TENSORS[CFG_IMG], walk=WRITE_TEXT, layout_walks=shows, trims_guided=True)
        return {"kv": {MAIN: main, CFG_IMG: cfg_img}}

    def checkpoint_path(self) -> str | None:
        return self._checkpoint_path

    def preprocess_fingerprint(self) -> str:
        return self._preprocessing

    def rope_fields(self) -> Mapping[str, Any]:
        return decoder_rope(self.config.text)

    def kv_layout(self, page_size: int, kv_dtype: str | None = None) -> KVLayout:
        return decoder_layout(self.config.text, self.net.dtype, page_size, kv_dtype)

    def weights_version(self) -> Hashable:
        return weights_version(self.net), weights_version(self.autoencoder)

    # -- what a request runs -------------------------------------------------------------------------------------------

    def schedule(self, record: PromptRecord, max_tokens: int) -> tuple[str, ...]:
        return _plan(record).schedule(max_tokens)

    def slots(self, record: PromptRecord, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        plan = _plan(record)
        slots = {label: plan.slots(label) for label in plan.labels()}
        return {label: (n, n + (plan.reply_slots(max_tokens) if label == MAIN else 0)) for label, n in slots.items()}

    def begin(self, record: PromptRecord) -> Canvas | None:
        plan = _plan(record)
        if plan.drawing is not None and plan.drawing.note is not None:
            logger.warning(plan.drawing.note)
        return Canvas.of(plan, self.config, self.net.device)

    def prepare_inputs(
        self, walk: str, record: PromptRecord, generated: Sequence[int], state: Any = None, walk_index: int = 0
    ) -> WalkInputs | None:
        if walk in (WRITE_TEXT, SHOW_PATCHES, SHOW_LATENTS):
            return _plan(record).inputs(walk_index)
        if walk == DECODE:
            return WalkInputs({MAIN: generated[-1:]}) if generated else None
        if walk == CLOSE_TEXT:
            return WalkInputs({MAIN: closing(generated, self.config.special.eos)})
        if walk == DRAW:
            canvas: Canvas = state
            return canvas.inputs(_plan(record))
        raise InputError(f"{type(self).__name__} runs no walk {walk!r}; its walks are {', '.join(self.walks())}")

    def split_inputs(self, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]) -> WalkInputs:
        return drop_leading(inputs, matches)

    def finish_pass(self, walk: str, state: Any, output: Any) -> bool:
        canvas: Canvas = state
        canvas.follow(output)
        return canvas.is_done

    @torch.no_grad()  # not inference mode: a client may change the pixels it gets
    def outputs(self, state: Any) -> Mapping[str, Any]:
        canvas: Canvas | None = state
        if canvas is None or not canvas.is_done:
            return {}
        if not bool(canvas.latents.isfinite().all()):
            raise KvlabError(
                "the picture's latents became NaN or infinite, so there is nothing to show; look for an overflow: a very large "
                "cfg_text_scale, cfg_img_scale or noise, the weights, or the dtype"
            )
        return {"pixels": to_uint8(self.decode_latents(canvas.latents, canvas.grid)).cpu()}

    # -- what runs -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def encode(self, walk: str, content: Any) -> Tensor:
        """Return the embeddings of a picture between its markers, [slots, hidden_size]."""
        shown: PicturePass = content
        return self.net.between_markers(self._patches(shown) if walk == SHOW_PATCHES else self._latents(shown))

    def decode_latents(self, latents: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the picture of latent tokens, [3, height, width], about -1 to 1 and not cut.

        Shapes:
            latents: [rows * columns, latent_width].
        """
        z = unpatchify(latents, grid, self.config.latent_patch_size)  # [latent_channels, height, width]
        weight = next(self.autoencoder.parameters())
        return self.autoencoder.decode(z[None].to(weight))[0]

    def _patches(self, shown: PicturePass) -> Tensor:
        size = resized_size(self.config.vit_rule, *shown.pixels.shape[:2])
        return self.net.embed_picture(from_uint8(torch.from_numpy(resize(shown.pixels, size))))

    def _latents(self, shown: PicturePass) -> Tensor:
        pixels = from_uint8(torch.from_numpy(shown.pixels))[None].to(next(self.autoencoder.parameters()))
        factor = self.config.autoencoder.downsample
        shape = (1, self.config.autoencoder.latent_channels, *(side // factor for side in pixels.shape[-2:]))
        noise = None if shown.noise is None else shown.noise.values(shape[1:]).reshape(shape)
        latents = self.autoencoder.encode(pixels, noise)[0]  # [latent_channels, height, width]
        tokens = patchify(latents, self.config.latent_patch_size)  # [tokens, latent_width]
        return self.net.embed_latents(tokens, self.config.latent_grid(*shown.pixels.shape[:2]), 0.0)

    @torch.inference_mode()
    def forward(self, walk: str, rows: Sequence[RowInputs], attention: AttentionBackend) -> Sequence[Any]:
        sizes = [len(row.positions) for row in rows]
        x = self._embedded(walk, rows)  # [tokens, hidden_size]
        positions = torch.tensor(list(chain.from_iterable(row.positions for row in rows)), device=self.net.device)
        is_gen = torch.cat([gen_mask(size - 2) for size in sizes]) if walk in (SHOW_LATENTS, DRAW) else None
        hidden = self.net.decode(x, positions, through_pages(attention), is_gen=is_gen).split(sizes)
        if walk == DRAW:
            return self._velocities(rows, hidden)
        wanted = zip((row.logits_from for row in rows), hidden, strict=True)
        return [None if start is None else self.net.logits(h[start:]) for start, h in wanted]

    def _embedded(self, walk: str, rows: Sequence[RowInputs]) -> Tensor:
        if walk == DRAW:
            blocks = {canvas: self._canvas(canvas) for canvas in {row.block.canvas for row in rows}}  # once for all contexts
            return torch.cat([blocks[row.block.canvas] for row in rows])
        if walk in (SHOW_PATCHES, SHOW_LATENTS):
            return torch.cat([row.block for row in rows])
        return self.net.embed_text(list(chain.from_iterable(row.ids for row in rows)))

    def _canvas(self, canvas: Canvas) -> Tensor:
        return self.net.between_markers(self.net.embed_latents(canvas.latents, canvas.grid, canvas.t))

    def _velocities(self, rows: Sequence[RowInputs], hidden: Sequence[Tensor]) -> list[Tensor | None]:
        """Return each canvas's combined velocity at its main row, None at the others."""
        found: dict[Canvas, dict[str, Tensor]] = {}
        for row, h in zip(rows, hidden, strict=True):
            branch: Branch = row.block
            found.setdefault(branch.canvas, {})[branch.label] = self.net.velocity(h[1:-1])  # without the markers
        combined = {canvas: canvas.combine(velocities) for canvas, velocities in found.items()}
        return [combined[row.block.canvas] if row.block.label == MAIN else None for row in rows]


def _plan(record: PromptRecord) -> Plan:
    plan: Plan = record.metadata["plan"]
    return plan
