"""The vision tower: SigLIP over the patches of one picture of any shape, and the way from its width to the decoder's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.models.bagel.config import BagelConfig, VisionConfig
from kvlab.models.bagel.patches import grid_positions, patchify


class VisionEmbeddings(nn.Module):
    """A linear map of patches plus a learned position for each place of the grid."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.side = config.side
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden_size)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        places = grid_positions(grid, self.side).to(patches.device)
        embedded: Tensor = self.patch_embedding(patches) + self.position_embedding(places)
        return embedded


class VisionTransformer(nn.Module):
    """Embeddings, SigLIP's encoder and the norm after it; every patch of a picture sees every other."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        layers = SiglipVisionConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            layer_norm_eps=config.layer_norm_eps,
            hidden_act="gelu_pytorch_tanh",
        )
        layers._attn_implementation = "sdpa"
        self.embeddings = VisionEmbeddings(config)
        self.encoder = SiglipEncoder(layers)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the features of pictures of one shape.

        Shapes:
            patches: [pictures, rows * columns, patch values]; result: [pictures, rows * columns, hidden_size].
        """
        seen = self.encoder(inputs_embeds=self.embeddings(patches, grid)).last_hidden_state
        features: Tensor = self.post_layernorm(seen)
        return features


class VisionTower(nn.Module):
    """The transformer under the name it has in a checkpoint."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.vision_model = VisionTransformer(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features of pictures of one shape.

        Shapes:
            pixels: [pictures, 3, height, width] from -1 to 1; result: [pictures, patches, hidden_size].
        """
        grid = (pixels.shape[-2] // self.patch_size, pixels.shape[-1] // self.patch_size)
        features: Tensor = self.vision_model(patchify(pixels, self.patch_size), grid)
        return features


class Connector(nn.Module):
    """Two layers from the tower's width to the decoder's."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.vision.hidden_size, config.text.hidden_size)
        self.fc2 = nn.Linear(config.text.hidden_size, config.text.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(features), approximate="tanh"))
        return out
