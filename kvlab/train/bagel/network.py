"""The network that is trained: BAGEL's own modules at a size that a CPU trains in about an hour."""

from __future__ import annotations

import torch
from torch import nn

from kvlab.models.bagel.config import BagelConfig, ResizeRule, VisionConfig
from kvlab.models.bagel.network import BagelNet
from kvlab.models.textlm import TextConfig
from kvlab.train.bagel import autoencoder, scenes, vocabulary

VIT_SIDE = 70  # the multiple of 14 nearest to the pictures' 64 pixels

CONFIG = BagelConfig(
    text=TextConfig(
        vocab_size=vocabulary.VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_seq_len=2048,
        rope_theta=1e6,
        qkv_bias=True,
    ),
    vision=VisionConfig(hidden_size=96, intermediate_size=256, num_layers=3, num_heads=3, side=10),
    autoencoder=autoencoder.CONFIG,
    max_latent_side=8,
    special=vocabulary.SPECIAL,
    vae_rule=ResizeRule(scenes.SIDE, scenes.SIDE, 16),
    vit_rule=ResizeRule(VIT_SIDE, VIT_SIDE, 14),
)
LATENT_GRID = CONFIG.latent_grid(scenes.SIDE, scenes.SIDE)
NUM_LATENTS = LATENT_GRID[0] * LATENT_GRID[1]
NUM_PATCHES = (VIT_SIDE // CONFIG.vision.patch_size) ** 2


@torch.no_grad()
def build(config: BagelConfig = CONFIG) -> BagelNet:
    """Return the network with random weights: even at every width, outputs of layers small, velocities zero."""
    net = BagelNet(config)
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        if ".layers." in name and name.endswith(("o_proj", "o_proj_moe_gen", "down_proj", "out_proj", "mlp.fc2")):
            num_layers = config.vision.num_layers if name.startswith("vit_model") else config.text.num_layers
            module.get_parameter("weight").div_((2 * num_layers) ** 0.5)
    nn.init.zeros_(net.llm2vae.weight)
    nn.init.normal_(net.language_model.lm_head.weight, std=config.text.hidden_size**-0.5)
    net.fill_tables()
    return net
