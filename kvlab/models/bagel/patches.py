"""Pictures as rows of patches, and where each patch stands: orders, grids and the fixed tables of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvlab.errors import InputError


def patchify(picture: Tensor, size: int) -> Tensor:
    """Cut a picture into square patches, row by row; the values of a patch lie by (row, column, channel).

    Shapes:
        picture: [..., channels, rows * size, columns * size]; result: [..., rows * columns, size * size * channels].

    >>> patchify(torch.arange(4.0).reshape(1, 2, 2), 2).tolist()
    [[0.0, 1.0, 2.0, 3.0]]
    """
    height, width = picture.shape[-2:]
    if height % size or width % size:
        raise InputError(f"a picture of {height} x {width} is not cut evenly into patches of {size}; resize it first")
    cut = picture.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., channels, rows, size, columns, size]
    channels, rows, row, columns, column = (cut.ndim - 5 + i for i in range(5))
    lead = range(cut.ndim - 5)
    return cut.permute(*lead, rows, columns, row, column, channels).flatten(-3).flatten(-3, -2)


def unpatchify(patches: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Put the patches of ``patchify`` back together; ``grid`` is (rows, columns).

    Shapes:
        patches: [..., rows * columns, size * size * channels]; result: [..., channels, rows * size, columns * size].
    """
    rows, columns = grid
    cut = patches.unflatten(-1, (size, size, -1)).unflatten(-4, (rows, columns))  # [..., rows, columns, size, size, channels]
    first = cut.ndim - 5
    lead = range(first)
    placed = cut.permute(*lead, first + 4, first, first + 2, first + 1, first + 3)  # [..., channels, rows, size, columns, size]
    return placed.flatten(-2).flatten(-3, -2)


def grid_positions(grid: tuple[int, int], side: int) -> Tensor:
    """Return where each patch of a grid stands in a table of ``side`` x ``side`` positions, row by row.

    >>> grid_positions((2, 3), 10).tolist()
    [0, 1, 2, 10, 11, 12]
    """
    rows, columns = grid
    if not (0 < rows <= side and 0 < columns <= side):
        raise InputError(f"a picture of {rows} x {columns} patches does not fit a table of {side} x {side}; make it smaller")
    return (torch.arange(rows)[:, None] * side + torch.arange(columns)).flatten()


def sincos_table(side: int, width: int) -> Tensor:
    """Return the fixed embedding of every place of a grid, [side * side, width] float32.

    The first half of the width tells the column and the second the row; each half is sines, then cosines, of the coordinate
    times 10000 ** (-i / (width / 4)).
    """
    if width % 4:
        raise InputError(f"a table of {width} values a place cannot be cut in four; use a multiple of 4")
    frequencies = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies  # [side, width / 4]
    coordinate = torch.cat((angles.sin(), angles.cos()), dim=1)  # [side, width / 2]
    column, row = coordinate.repeat(side, 1), coordinate.repeat_interleave(side, dim=0)  # [side * side, width / 2]
    return torch.cat((column, row), dim=1).float()


class PositionTable(nn.Module):
    """A fixed sine and cosine table that checkpoints carry like a weight."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side * side, width), requires_grad=False)

    def fill(self) -> None:
        """Write the table's values, for a network that is not loaded from a checkpoint."""
        self.pos_embed.data.copy_(sincos_table(self.side, self.pos_embed.shape[1]))

    def forward(self, grid: tuple[int, int]) -> Tensor:
        return self.pos_embed[grid_positions(grid, self.side).to(self.pos_embed.device)]
