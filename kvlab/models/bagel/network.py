"""BagelNet: decoder, vision tower and latent maps, under the names of the release; the steps of a request call its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.latents import TimeEmbedder
from kvlab.models.bagel.mot import Attend, Experts, MoTForCausalLM
from kvlab.models.bagel.patches import PositionTable
from kvlab.models.bagel.vision import Connector, VisionTower


class BagelNet(nn.Module):
    """Everything but the autoencoder; ``state_dict`` has the names and shapes of an ema.safetensors.

    Parts of a step: embed (``embed_text``, ``embed_picture``, ``embed_latents``, ``between_markers``), ``decode``, then
    ``logits`` or ``velocity``. All of them record gradients unless the caller says otherwise.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        width = config.text.hidden_size
        self.config = config
        self.language_model = MoTForCausalLM(config.text)
        self.vit_model = VisionTower(config.vision)
        self.connector = Connector(config)
        self.vit_pos_embed = PositionTable(config.vision.side, width)
        self.latent_pos_embed = PositionTable(config.max_latent_side, width)
        self.time_embedder = TimeEmbedder(width)
        self.vae2llm = nn.Linear(config.latent_width, width)
        self.llm2vae = nn.Linear(width, config.latent_width)

    @property
    def dtype(self) -> torch.dtype:
        return self.vae2llm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.vae2llm.weight.device

    def fill_tables(self) -> None:
        """Write the fixed tables of positions, for a network that is trained from nothing."""
        self.vit_pos_embed.fill()
        self.latent_pos_embed.fill()

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def embed_text(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Return the embeddings of ids, [..., tokens, hidden_size]."""
        embedded: Tensor = self.language_model.model.embed_tokens(torch.as_tensor(ids, device=self.device))
        return embedded

    def embed_picture(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of pictures that are looked at, without markers.

        Shapes:
            pixels: [..., 3, height, width] from -1 to 1; result: [..., patches, hidden_size].
        """
        size = self.config.vision.patch_size
        pixels = pixels.to(device=self.device, dtype=self.dtype)
        features = self.vit_model(pixels.reshape(-1, *pixels.shape[-3:]))  # [pictures, patches, vision width]
        grid = (pixels.shape[-2] // size, pixels.shape[-1] // size)
        embedded: Tensor = self.connector(features) + self.vit_pos_embed(grid)
        return embedded.reshape(*pixels.shape[:-3], *embedded.shape[-2:])

    def embed_latents(self, latents: Tensor, grid: tuple[int, int], t: Tensor | float) -> Tensor:
        """Return the embeddings of latent tokens, without markers; a picture that is context stands at ``t`` = 0.

        Args:
            latents: Tokens in the order of ``patchify``.
            grid: Rows and columns of tokens.
            t: How much is noise, from 0 to 1: one number, or one a picture.

        Shapes:
            latents: [..., tokens, latent_width]; t: [...] or a number; result: [..., tokens, hidden_size].
        """
        time = torch.as_tensor(t, dtype=torch.float32, device=self.device)
        latents = latents.to(device=self.device, dtype=self.dtype)
        embedded: Tensor = self.vae2llm(latents) + self.time_embedder(time)[..., None, :] + self.latent_pos_embed(grid)
        return embedded

    def between_markers(self, block: Tensor) -> Tensor:
        """Return a picture's embeddings between those of its start and its end, [..., tokens + 2, hidden_size]."""
        special = self.config.special
        markers = self.embed_text([special.start_of_image, special.end_of_image])  # [2, hidden_size]
        start, end = (marker.expand(*block.shape[:-2], 1, -1) for marker in markers)
        return torch.cat((start, block, end), dim=-2)

    # -- decoder -------------------------------------------------------------------------------------------------------

    def decode(self, x: Tensor, positions: Tensor, attend: Attend, *, is_gen: Tensor | None = None) -> Tensor:
        """Run embeddings through the decoder.

        Args:
            x: Embeddings of all rows, packed or in a batch of equal lengths.
            positions: One rope id a token; a picture's tokens share one.
            attend: Pages (``through_pages``), plain tensors or a mask; it sees tokens of a batch packed row by row.
            is_gen: True for latents, which go through the weights ending in ``_moe_gen``; markers do not. None = no latents.

        Shapes:
            x and result: [..., tokens, hidden_size]; positions and is_gen: [..., tokens], or [tokens] for every row.
        """
        shape = x.shape[:-1]
        flat_gen = None if is_gen is None else is_gen.to(x.device).expand(shape).reshape(-1)
        flat_positions = positions.to(x.device).expand(shape).reshape(-1)
        hidden: Tensor = self.language_model.model(x.flatten(0, -2), flat_positions, Experts.of(flat_gen), attend)
        return hidden.view(*shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 scores over the vocabulary (float64 from a float64 network), [..., vocab_size]."""
        scores: Tensor = self.language_model.lm_head(hidden)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def velocity(self, hidden: Tensor) -> Tensor:
        """Return the velocities of latent tokens, [..., latent_width]; leave the markers out."""
        out: Tensor = self.llm2vae(hidden)
        return out


def gen_mask(num_latents: int) -> Tensor:
    """Return which tokens of a block of latents between markers are latents, [num_latents + 2] bool.

    >>> gen_mask(2).tolist()
    [False, True, True, False]
    """
    mask = torch.ones(num_latents + 2, dtype=torch.bool)
    mask[[0, -1]] = False
    return mask
