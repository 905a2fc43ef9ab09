"""The checkpoint folder: the release's files, the network in bfloat16 and the autoencoder in float32."""

from __future__ import annotations

from pathlib import Path

import torch

from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.weights import save_bagel
from kvlab.train.bagel import vocabulary


def write(folder: Path, net: BagelNet, autoencoder: Autoencoder) -> None:
    """Write network, autoencoder, their configs and the tokenizer."""
    save_bagel(folder, net, autoencoder, dtype=torch.bfloat16)
    vocabulary.write(folder, vocabulary.make_tokenizer())
