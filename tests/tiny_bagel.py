"""A BAGEL of random weights that reads English and draws nothing anybody would recognise, in the files of the release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

TEXT = "a red circle left of a blue square on a white background"  # 14 slots with what opens and closes it


def write_folder(folder: Path) -> Path:
    """Write it; velocities are not zero, as they are where training begins, so that a context matters."""
    from kvlab.models.bagel.autoencoder import Autoencoder
    from kvlab.train.bagel import autoencoder, export, network

    torch.manual_seed(0)
    text = replace(network.CONFIG.text, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, head_dim=16)
    net = network.build(replace(network.CONFIG, text=text))
    torch.nn.init.normal_(net.llm2vae.weight, std=0.125)
    made = Autoencoder(autoencoder.CONFIG)
    made.net.eval()
    export.write(folder, net, made)
    return folder
