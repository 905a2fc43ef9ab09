"""The codec: snac's network in small, trained on spoken phrases without an adversary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.errors import missing_extra
from kvlab.progress import progress
from kvlab.train.orpheus import quick
from kvlab.train.orpheus.corpus import FRAME_SAMPLES, SAMPLE_RATE

CONFIG: dict[str, Any] = {
    "sampling_rate": SAMPLE_RATE,
    "encoder_dim": 8,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 256,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 512,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
SEGMENT_FRAMES = 4
SEGMENT_SAMPLES = SEGMENT_FRAMES * FRAME_SAMPLES
BATCH = 4
PEAK_LR = 1.5e-3
DECODER_PEAK_LR = 1e-3

UNQUANTISED_STEPS = 150
RESTART_EVERY_STEPS = 25
RESTART_SHARE = 0.7
_USE_DECAY = 0.98
_DEAD_SHARE = 0.05
_KEPT_LATENTS = 2048


def build(config: Mapping[str, Any] = CONFIG) -> nn.Module:
    """Return snac's network with random weights."""
    try:
        from snac import SNAC
    except ImportError as missing:
        raise missing_extra("snac", "audio", "for the codec") from missing
    return cast(nn.Module, SNAC(**config))


def from_weights(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a trained network, ready to encode.

    Raises:
        RuntimeError: the weights are of another shape.
    """
    net = build()
    quick.speed_up(net)
    net.load_state_dict(dict(weights))
    return net.eval().requires_grad_(False)


# -- loss on sounds ----------------------------------------------------------------------------------------------------


class MelLoss(nn.Module):
    """Mean distance of mel spectra at several sizes: of their logs down to -60 dB, and of the spectra themselves."""

    SIZES = ((128, 16), (256, 32), (512, 48), (1024, 80), (2048, 80))
    FLOOR = 1e-3
    LINEAR = 0.4

    def __init__(self) -> None:
        super().__init__()
        for size, num_bands in self.SIZES:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
            self.register_buffer(f"bands_{size}", mel_bands(size, num_bands), persistent=False)

    def forward(self, made: Tensor, true: Tensor) -> Tensor:
        """Compare two batches of sounds [batch, samples]."""
        both = torch.cat([made, true])
        total = torch.zeros(())
        for size, _ in self.SIZES:
            ours, theirs = self._mel(both, size).chunk(2)
            log_ours, log_theirs = ours.clamp_min(self.FLOOR).log10(), theirs.clamp_min(self.FLOOR).log10()
            scale = theirs.mean().clamp_min(self.FLOOR)
            total = total + (log_ours - log_theirs).abs().mean() + self.LINEAR * (ours - theirs).abs().mean() / scale
        return total / len(self.SIZES)

    def _mel(self, sound: Tensor, size: int) -> Tensor:
        window = self.get_buffer(f"window_{size}")
        spectrum = torch.stft(sound, size, size // 4, window=window, return_complex=True)
        # a full-scale sine is 1 whatever the size
        power = (torch.view_as_real(spectrum) * (2 / window.sum())).square().sum(-1)
        return (self.get_buffer(f"bands_{size}") @ power + 1e-10).sqrt()  # [batch, bands, hops]


def mel_bands(size: int, num_bands: int) -> Tensor:
    """Return triangular bands over the bins of an STFT, even on the mel scale, each summing to 1: [bands, size // 2 + 1]."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, num_bands + 2) / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE / 2, size // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    bands = torch.minimum(rising, falling).clamp_min(0)
    return bands / bands.sum(1, keepdim=True).clamp_min(1e-6)


# -- training ----------------------------------------------------------------------------------------------------------


class CodecTask:
    """Trains a codec on recordings; see ``kvlab.train.loop.Task``."""

    name = "codec"
    peak_lr = PEAK_LR

    def __init__(
        self,
        sounds: Sequence[Tensor],
        *,
        num_steps: int,
        config: Mapping[str, Any] = CONFIG,
        unquantised_steps: int = UNQUANTISED_STEPS,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.net: Any = build(config)
        quick.speed_up(self.net)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=PEAK_LR, betas=(0.8, 0.99), weight_decay=0.01
        )
        self.sounds, self.loss = sounds, MelLoss()
        self.unquantised_steps = unquantised_steps
        self.last_restart = int(RESTART_SHARE * num_steps)
        size, dim = config["codebook_size"], config["codebook_dim"]
        self.uses = [torch.zeros(size) for _ in config["vq_strides"]]
        self.latents = [torch.zeros(0, dim) for _ in config["vq_strides"]]

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """One batch of segments through encoder, quantisers and decoder."""
        true = self._segments()
        z = self.net.encoder(true[:, None])
        terms = {}
        if step_index < self.unquantised_steps:
            z = self._project(z)
        else:
            z, terms["commit"] = self._quantise(z)
        made = self.net.decoder(z)[:, 0]
        return {"mel": self.loss(made, true), **terms}

    def after(self, step_index: int) -> None:
        """Fill the code books when quantising begins, then give codes that nothing uses a latent of the data."""
        if step_index == self.unquantised_steps - 1:
            self._restart(everything=True)
        elif self.unquantised_steps <= step_index < self.last_restart and step_index % RESTART_EVERY_STEPS == 0:
            self._restart(everything=False)

    def state(self) -> dict[str, Any]:
        return {"uses": self.uses, "latents": self.latents}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.uses, self.latents = list(state["uses"]), list(state["latents"])

    def _segments(self) -> Tensor:
        picked = [self.sounds[i] for i in torch.randint(len(self.sounds), (BATCH,)).tolist()]
        return torch.stack([_segment(sound) for sound in picked])

    def _quantise(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """snac's quantiser with its two losses: codes drawn to the latents, and latents to the codes."""
        residual, total, loss = z, torch.zeros_like(z), torch.zeros(())
        for level, quantizer in enumerate(self.net.quantizer.quantizers):
            latent = quantizer.in_proj(F.avg_pool1d(residual, quantizer.stride, quantizer.stride))
            code, index = quantizer.decode_latents(latent)
            loss = loss + F.mse_loss(code, latent.detach()) + 0.25 * F.mse_loss(latent, code.detach())
            self._note(level, latent.detach(), index)
            part = quantizer.out_proj(latent + (code - latent).detach()).repeat_interleave(quantizer.stride, dim=-1)
            total, residual = total + part, residual - part
        return total, loss

    def _project(self, z: Tensor) -> Tensor:
        """The quantiser without its code books, so that these can be made from what the latents become."""
        residual, total = z, torch.zeros_like(z)
        for level, quantizer in enumerate(self.net.quantizer.quantizers):
            latent = quantizer.in_proj(F.avg_pool1d(residual, quantizer.stride, quantizer.stride))
            self._note(level, latent.detach(), None)
            part = quantizer.out_proj(latent).repeat_interleave(quantizer.stride, dim=-1)
            total, residual = total + part, residual - part
        return total

    def _note(self, level: int, latent: Tensor, index: Tensor | None) -> None:
        flat = latent.transpose(1, 2).flatten(0, 1)  # [batch * hops, dim]
        self.latents[level] = torch.cat([self.latents[level], flat])[-_KEPT_LATENTS:]
        if index is not None:
            counts = torch.bincount(index.flatten(), minlength=len(self.uses[level]))
            self.uses[level] = self.uses[level] * _USE_DECAY + counts * (1 - _USE_DECAY)

    def _restart(self, *, everything: bool) -> None:
        for quantizer, uses, latents in zip(self.net.quantizer.quantizers, self.uses, self.latents, strict=True):
            dead = torch.ones_like(uses, dtype=torch.bool) if everything else uses < _DEAD_SHARE * uses.mean()
            picked = latents[torch.randint(len(latents), (int(dead.sum()),))]
            with torch.no_grad():
                quantizer.codebook.weight[dead] = picked + 1e-3 * torch.randn_like(picked)
            uses[dead] = uses.mean()


class DecoderTask:
    """Trains a codec's decoder further while encoder and code books stand still, and with them every recording's codes."""

    name = "decoder"
    peak_lr = DECODER_PEAK_LR

    def __init__(self, net: Any, sounds: Sequence[Tensor]) -> None:
        self.net, self.loss = net, MelLoss()
        quick.speed_up(net)
        net.requires_grad_(False)
        net.decoder.requires_grad_(True)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            net.decoder.parameters(), lr=DECODER_PEAK_LR, betas=(0.8, 0.99), weight_decay=0.01
        )
        self.sounds = [_whole_frames(sound, at_least=SEGMENT_FRAMES) for sound in sounds]

    @cached_property
    def codes(self) -> list[Tensor]:
        """The codes of every recording; a run that is done already never asks."""
        return [encode(self.net, sound) for sound in progress(self.sounds, "encoding")]

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """One batch of stretches of codes, against the sounds they came from."""
        picked = [self._stretch(i) for i in torch.randint(len(self.sounds), (BATCH,)).tolist()]
        codes, true = (torch.stack(parts) for parts in zip(*picked, strict=True))
        made = self.net.decoder(self.net.quantizer.from_codes(levels(codes)))[:, 0]
        return {"mel": self.loss(made, true)}

    def after(self, step_index: int) -> None:
        """Nothing follows a step."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing beside weights and optimizer."""

    def _stretch(self, i: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.codes[i]) - SEGMENT_FRAMES + 1, ()))
        end = start + SEGMENT_FRAMES
        return self.codes[i][start:end], self.sounds[i][start * FRAME_SAMPLES : end * FRAME_SAMPLES]


def _whole_frames(sound: Tensor, *, at_least: int = 0) -> Tensor:
    missing = max(at_least * FRAME_SAMPLES - len(sound), -len(sound) % FRAME_SAMPLES)
    return F.pad(sound, (0, missing))


def _segment(sound: Tensor) -> Tensor:
    spare = len(sound) - SEGMENT_SAMPLES
    if spare <= 0:
        return F.pad(sound, (0, -spare))
    start = int(torch.randint(spare + 1, ()))
    return sound[start : start + SEGMENT_SAMPLES]


# -- codes -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def encode(net: Any, sound: Tensor) -> Tensor:
    """Return a recording's codes as rows of seven in the order the speech model writes them: [frames, 7]."""
    coarse, middle, fine = (level[0] for level in net.encode(_whole_frames(sound)[None, None]))
    middle, fine = middle.view(-1, 2), fine.view(-1, 4)
    columns = [coarse, middle[:, 0], fine[:, 0], fine[:, 1], middle[:, 1], fine[:, 2], fine[:, 3]]
    return torch.stack(columns, dim=1)


def levels(frames: Tensor) -> list[Tensor]:
    """Return the codes of each level, [batch, frames * 1, 2 and 4], from rows of seven [batch, frames, 7]."""
    return [frames[..., slots].flatten(1) for slots in ([0], [1, 4], [2, 3, 5, 6])]
