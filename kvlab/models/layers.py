"""What decoders are made of: linear, RMS norm, rotary embedding, gated MLP, self-attention over pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.attention.base import AttentionBackend

#: oneDNN's float32 product on ordinary weights; faster than the BLAS behind F.linear for all but a single row, which is as fast
#: as memory there, on one thread that waits for no other. It records no gradient.
_ONEDNN_LINEAR = (
    torch.ops.mkldnn._linear_pointwise
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


class Linear(nn.Linear):
    """nn.Linear with the fastest product for float32 on a CPU; the same sums, and plain F.linear everywhere else."""

    def store_by_input(self) -> None:
        """Give the weight new memory, laid out so that the values of one input are neighbours, where that is faster.

        Shape and meaning of ``weight`` stay [out, in]. A single token then streams through it at memory speed, and few tokens
        need less of it rearranged.
        """
        weight = self.weight
        if _is_fast(weight):
            by_input = torch.empty(self.in_features, self.out_features, dtype=weight.dtype, device=weight.device)
            self.weight = nn.Parameter(by_input.t(), requires_grad=weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if _ONEDNN_LINEAR is not None and x.shape[0] > 1 and _is_fast(weight) and _is_fast(x) and not torch.is_grad_enabled():
            out: Tensor = _ONEDNN_LINEAR(x, weight, self.bias, "none", [], "")
            return out
        return F.linear(x, weight, self.bias)


def _is_fast(x: Tensor) -> bool:
    return _ONEDNN_LINEAR is not None and x.dtype == torch.float32 and x.device.type == "cpu"


class RMSNorm(nn.Module):
    """Scales each token to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not _is_fast(x):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # One pass over x where the general kernel makes several copies of it: a tenth of the time on a prompt.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)


# -- rotary embedding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeScaling:
    """The llama3 rule: slow frequencies are divided by ``factor``, fast ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Rope:
    """cos and signed sin of a step's positions, made once and read by every layer.

    Shapes:
        cos, sin: [tokens, 1, head_dim]; the first half of ``sin`` is negated.
    """

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of each head by the token's angles; x [tokens, heads, head_dim]."""
        return (x * self.cos).addcmul_(x.roll(x.shape[-1] // 2, -1), self.sin)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype) -> Tensor:
    """Return the angle a position advances each pair of a head by, [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / head_dim
    freqs = 1.0 / theta**exponents
    if scaling is None:
        return freqs
    turns = scaling.original_max_positions / (2 * math.pi / freqs)  # in the context the model was first trained on
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * freqs / scaling.factor + blend * freqs
    slow, fast = turns < scaling.low_freq_factor, turns > scaling.high_freq_factor
    return torch.where(slow, freqs / scaling.factor, torch.where(fast, freqs, blended))


class RotaryEmbedding(nn.Module):
    """Makes the Rope of a step.

    Frequencies and angles are float32 whatever the network computes in, as a bfloat16 angle is off by whole turns; a float64
    network has them in float64. They are no buffer, so that casting the module cannot round them.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self._frequencies: dict[torch.dtype, Tensor] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if exact not in self._frequencies:
            self._frequencies[exact] = rope_frequencies(self.head_dim, self.theta, self.scaling, exact)
        freqs = self._frequencies[exact].to(positions.device)
        angles = positions.to(exact)[:, None, None] * freqs  # [tokens, 1, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        return Rope(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))  # [tokens, 1, head_dim]


# -- the two halves of a decoder layer ---------------------------------------------------------------------------------


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(size, 2 * inner_size, bias=False)
        self.down_proj = Linear(inner_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # 2 x [tokens, inner_size]
        down: Tensor = self.down_proj(F.silu(gate).mul_(up))
        return down

    def checkpoint_slices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a checkpoint with the part of a parameter it fills."""
        gate, up = self.gate_up_proj.weight.chunk(2)
        yield from (("gate_proj.weight", gate), ("up_proj.weight", up), ("down_proj.weight", self.down_proj.weight))


class PagedSelfAttention(nn.Module):
    """Self-attention whose K and V live in pages, with q, k and v in one product.

    What a token sees is the backend's tables: causal or a whole block, whatever rows and labels are in the step.
    """

    def __init__(
        self, layer: int, size: int, *, num_heads: int, num_kv_heads: int, head_dim: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv_proj = Linear(size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, size, bias=False)

    def forward(self, x: Tensor, rope: Rope, attention: AttentionBackend) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [tokens, num_heads + 2 * num_kv_heads, head_dim]
        rotated = rope.rotate(heads[:, : self.num_heads + self.num_kv_heads])  # q and k at once
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        attention.write(self.layer, k, heads[:, -self.num_kv_heads :])
        seen = attention.attend(self.layer, q).flatten(1)  # [tokens, num_heads * head_dim]
        out: Tensor = self.o_proj(seen)
        return out

    def checkpoint_slices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a checkpoint with the part of a parameter it fills."""
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        for kind, fused in self.qkv_proj.named_parameters():
            for name, part in zip("qkv", fused.split(sizes), strict=True):
                yield f"{name}_proj.{kind}", part
        yield "o_proj.weight", self.o_proj.weight
