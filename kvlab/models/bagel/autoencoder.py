"""The autoencoder between pixels and latents: diffusers' AutoencoderKL under the names and the scale of FLUX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvlab.errors import InputError, missing_extra
from kvlab.models.bagel.config import AutoencoderConfig

#: From the names of diffusers to those of the file. Levels of the decoder are counted from the other end.
RENAMES = (
    (r"^encoder\.down_blocks\.(\d+)\.", r"encoder.down.\1."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.resnets\.(\d+)\.", r".block.\1."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.conv_norm_out\.", ".norm_out."),
)


class Autoencoder(nn.Module):
    """Turns pictures into latents and back.

    Raises:
        MissingExtraError: ``diffusers`` is not installed.
    """

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        self.net = _autoencoder_kl()(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * len(config.multipliers),
            up_block_types=("UpDecoderBlock2D",) * len(config.multipliers),
            block_out_channels=tuple(config.channels * m for m in config.multipliers),
            layers_per_block=config.num_res_blocks,
            latent_channels=config.latent_channels,
            norm_num_groups=config.norm_groups,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )

    def moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance of pictures' latents.

        Shapes:
            pixels: [pictures, 3, height, width] from -1 to 1; results: [pictures, latent_channels, height / f, width / f].
        """
        factor = self.config.downsample
        if pixels.shape[-2] % factor or pixels.shape[-1] % factor:
            height, width = pixels.shape[-2:]
            raise InputError(f"a picture of {height} x {width} pixels has sides that {factor} does not divide; resize it first")
        mean, log_variance = self.net.encoder(pixels).chunk(2, dim=1)
        return mean, log_variance

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return scaled latents: the mean, or with ``noise`` of the latents' shape a sample."""
        mean, log_variance = self.moments(pixels)
        if noise is not None:
            if noise.shape != mean.shape:
                raise InputError(f"noise has shape {list(noise.shape)} and the latents {list(mean.shape)}; give one value each")
            mean = mean + torch.exp(0.5 * log_variance) * noise.to(mean)
        return self.config.scale * (mean - self.config.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pictures of scaled latents, [pictures, 3, height, width], about -1 to 1 and not cut."""
        pixels: Tensor = self.net.decoder(latents / self.config.scale + self.config.shift)
        return pixels

    def file_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter with the name and in the shape that it has in an ae.safetensors."""
        levels = len(self.config.multipliers)
        for name, value in self.net.named_parameters():
            file_name = _flux_name(name, levels)
            is_product = ".attn_1." in file_name and file_name.endswith("weight") and value.ndim == 2
            yield file_name, value[:, :, None, None] if is_product else value


def to_uint8(pixels: Tensor) -> Tensor:
    """Return pictures [..., 3, height, width] from -1 to 1 as bytes [..., height, width, 3]; cut, not rounded."""
    return ((pixels * 0.5 + 0.5).clamp(0, 1).movedim(-3, -1) * 255).to(torch.uint8)


def from_uint8(picture: Tensor) -> Tensor:
    """Return bytes [..., height, width, 3] as pixels [..., 3, height, width] from -1 to 1."""
    return (picture.movedim(-1, -3).float() / 255 - 0.5) / 0.5


def _flux_name(name: str, levels: int) -> str:
    up = re.match(r"decoder\.up_blocks\.(\d+)\.", name)
    if up:
        name = f"decoder.up.{levels - 1 - int(up[1])}.{name[up.end() :]}"
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _autoencoder_kl() -> Any:
    try:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    except ImportError as e:
        raise missing_extra("diffusers", "bagel", "to turn pictures into latents and back") from e
    return AutoencoderKL
