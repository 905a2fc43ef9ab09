"""A lesson for the vision tower alone: of which shape each patch is. Answers of a word or two teach it too slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.models.bagel.network import BagelNet
from kvlab.train.bagel import scenes

#: A patch shows the shape that covers most of it, if that is at least this share.
LEAST_COVER = 0.15


class PatchProbe(nn.Module):
    """Tells shapes from the features of patches; used in training and not kept."""

    def __init__(self, net: BagelNet) -> None:
        super().__init__()
        self.head = nn.Linear(net.config.vision.hidden_size, len(scenes.SHAPES) + 1)
        self._features: list[Tensor] = []
        net.vit_model.register_forward_hook(self._keep)

    def _keep(self, tower: nn.Module, given: Any, features: Tensor) -> None:
        if torch.is_grad_enabled():
            self._features = [features]

    def nats(self, drawings: Sequence[scenes.Drawing]) -> Tensor:
        """Return the mean cross-entropy over the patches of the pictures that the tower saw last."""
        (features,), self._features = self._features, []
        side = int(features.shape[1] ** 0.5)
        labels = torch.from_numpy(np.stack([shapes_of_patches(drawing, side) for drawing in drawings]))
        return F.cross_entropy(self.head(features.float()).flatten(0, 1), labels.flatten())


def shapes_of_patches(drawing: scenes.Drawing, side: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return for each of side x side patches the number of its shape, counted from 1; 0 = background."""
    starts = np.linspace(0, scenes.SIDE, side + 1)[:-1].round().astype(int)
    size = (scenes.SIDE / side) ** 2
    covers = [np.full((side, side), LEAST_COVER)]
    for thing, spot in zip(drawing.scene.things, drawing.spots, strict=True):
        cover = scenes.coverage(thing.shape, *spot)
        covers.append(np.add.reduceat(np.add.reduceat(cover, starts, 0), starts, 1) / size)
    numbers = np.array([0, *(scenes.SHAPES.index(thing.shape) + 1 for thing in drawing.scene.things)])
    return np.asarray(numbers[np.stack(covers).argmax(0)].ravel(), np.int64)
