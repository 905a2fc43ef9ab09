"""The codec's two costly layers on a CPU, with the same weights and the same sums in a third of the time."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Snake(torch.autograd.Function):
    """x + sin²(alpha x) / alpha; one sine on the way and one on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        y = torch.sin(alpha * x).square_().div_(alpha).add_(x)
        ctx.save_for_backward(x, alpha, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, alpha, y) = grads, ctx.saved_tensors
        slope = ((2 * alpha) * x).sin_().add_(1)
        by_alpha = (slope * x).sub_(y).mul_(grad).sum((0, 2), keepdim=True) / alpha
        return slope.mul_(grad), by_alpha


class Depthwise(torch.autograd.Function):
    """A convolution of each channel by itself, output as long as the input, as one shifted product a tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dilation = dilation
        return _taps(x, weight[:, 0], bias, dilation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        grad, (x, weight), dilation = grads[0].contiguous(), ctx.saved_tensors, ctx.dilation
        by_x = _taps(grad, weight[:, 0].flip(1), grad.new_zeros(()), dilation)
        padded = _pad(x, weight.shape[-1], dilation)
        batch, channels, length = x.shape
        shifted = padded.as_strided((batch, channels, weight.shape[-1], length), (*padded.stride()[:2], dilation, 1))
        by_weight = torch.matmul(shifted, grad[..., None]).sum(0)  # [channels, taps, 1]
        return by_x, by_weight.transpose(1, 2), grad.sum((0, 2)), None


def _pad(x: Tensor, taps: int, dilation: int) -> Tensor:
    reach = dilation * (taps - 1) // 2
    return F.pad(x, (reach, reach))


def _taps(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    length, taps = x.shape[-1], weight.shape[-1]
    padded = _pad(x, taps, dilation)
    out = torch.addcmul(bias[..., None], padded[..., :length], weight[:, :1])
    for tap in range(1, taps):
        out.addcmul_(padded[..., tap * dilation : tap * dilation + length], weight[:, tap : tap + 1])
    return out


class QuickSnake(nn.Module):
    """snac's activation, under the same name of its weight."""

    def __init__(self, alpha: nn.Parameter) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Snake.apply(x, self.alpha))


class _QuickDepthwise(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, Depthwise.apply(input, self.weight, self.bias, self.dilation[0]))


def speed_up(net: nn.Module) -> None:
    """Swap the activations and the depthwise convolutions of a codec for the quick ones; names and weights stay."""
    for name, child in net.named_children():
        if type(child).__name__ == "Snake1d":
            setattr(net, name, QuickSnake(cast(nn.Parameter, child.alpha)))
        elif isinstance(child, nn.Conv1d) and child.groups == child.in_channels == child.out_channels > 1:
            _use_taps(child)
        else:
            speed_up(child)


def _use_taps(layer: nn.Conv1d) -> None:
    # weight norm made a class of its own for this layer; a new one under it keeps the parametrised weight
    layer.__class__ = type("QuickDepthwise", (layer.__class__,), {"forward": _QuickDepthwise.forward})
