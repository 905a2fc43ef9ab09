"""The decoder: a mixture of transformers, with one set of weights for what is read, one for latents, and one attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.errors import InputError
from kvlab.models.layers import Linear, RMSNorm, Rope, RotaryEmbedding
from kvlab.models.textlm import TextConfig

#: (layer, q, k, v) -> what each token has seen, all [tokens, heads, head_dim]: the seam for pages, plain tensors and training.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: Ends the names of the weights that latents go through.
GEN = "_moe_gen"


@dataclass(frozen=True)
class Experts:
    """Which packed tokens go through which copy of the weights: indices of each, None where there are none of the kind.

    ``back`` puts the two groups, one after the other, into the packed order again.
    """

    und: Tensor | None = None
    gen: Tensor | None = None
    back: Tensor | None = None

    @classmethod
    def of(cls, is_gen: Tensor | None) -> Experts:
        """Return the experts of tokens that are latents where ``is_gen`` [tokens] is True; None = nowhere."""
        if is_gen is None:
            return cls()
        und, gen = (~is_gen).nonzero()[:, 0], is_gen.nonzero()[:, 0]
        if not len(gen):
            return cls()
        return cls(und, gen, torch.cat((und, gen)).argsort()) if len(und) else cls(gen=gen)

    def apply(self, x: Tensor, und: Callable[[Tensor], Tensor], gen: Callable[[Tensor], Tensor]) -> Tensor:
        """Run each token of ``x`` [tokens, ...] through its expert."""
        if self.gen is None:
            return und(x)
        if self.und is None or self.back is None:
            return gen(x)
        return torch.cat((und(x[self.und]), gen(x[self.gen])))[self.back]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the names are those of the checkpoint."""

    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(size, inner_size, bias=False)
        self.up_proj = Linear(size, inner_size, bias=False)
        self.down_proj = Linear(inner_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class MoTAttention(nn.Module):
    """Two sets of projections and q/k norms around one attention over all tokens."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads = (config.num_heads, config.num_kv_heads)
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        for suffix in ("", GEN):
            for name, heads in sizes.items():
                proj = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
                self.add_module(f"{name}_proj{suffix}", proj)
            self.add_module(f"o_proj{suffix}", Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False))
            self.add_module(f"q_norm{suffix}", RMSNorm(config.head_dim, config.rms_norm_eps))
            self.add_module(f"k_norm{suffix}", RMSNorm(config.head_dim, config.rms_norm_eps))

    def project(self, x: Tensor, suffix: str) -> Tensor:
        """Return q, k and v of tokens of one expert, q and k normed: [tokens, num_heads + 2 * num_kv_heads, head_dim]."""
        q, k, v = (getattr(self, f"{name}_proj{suffix}")(x).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        return torch.cat((getattr(self, f"q_norm{suffix}")(q), getattr(self, f"k_norm{suffix}")(k), v), dim=1)

    def attend(self, heads: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Return what each token has seen, [tokens, num_heads * head_dim]."""
        num_heads, num_kv_heads = self.heads
        rotated = rope.rotate(heads[:, : num_heads + num_kv_heads])  # q and k at once
        q, k = rotated.split((num_heads, num_kv_heads), dim=1)
        return attend(self.layer, q, k, heads[:, -num_kv_heads:]).flatten(1)


class MoTLayer(nn.Module):
    """Attention, then MLP, each on the normed residual stream and added to it, every token by its own expert."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = MoTAttention(config, layer)
        for suffix in ("", GEN):
            self.add_module(f"input_layernorm{suffix}", RMSNorm(config.hidden_size, config.rms_norm_eps))
            self.add_module(f"post_attention_layernorm{suffix}", RMSNorm(config.hidden_size, config.rms_norm_eps))
            self.add_module(f"mlp{suffix}", MLP(config.hidden_size, config.intermediate_size))

    def forward(self, x: Tensor, rope: Rope, experts: Experts, attend: Attend) -> Tensor:
        heads = experts.apply(x, lambda x: self._project(x, ""), lambda x: self._project(x, GEN))
        seen = self.self_attn.attend(heads, rope, attend)
        x = x + experts.apply(seen, self.self_attn.get_submodule("o_proj"), self.self_attn.get_submodule(f"o_proj{GEN}"))
        return x + experts.apply(x, lambda x: self._mlp(x, ""), lambda x: self._mlp(x, GEN))

    def _project(self, x: Tensor, suffix: str) -> Tensor:
        return self.self_attn.project(getattr(self, f"input_layernorm{suffix}")(x), suffix)

    def _mlp(self, x: Tensor, suffix: str) -> Tensor:
        out: Tensor = getattr(self, f"mlp{suffix}")(getattr(self, f"post_attention_layernorm{suffix}")(x))
        return out


class MoTModel(nn.Module):
    """Embedding, layers and final norms."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MoTLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)

    def forward(self, x: Tensor, positions: Tensor, experts: Experts, attend: Attend) -> Tensor:
        """Return the normed hidden states of packed tokens.

        Shapes:
            x and result: [tokens, hidden_size]; positions: [tokens] int64, one rope id a token.
        """
        if len(x) != len(positions):
            raise InputError(f"{len(x)} tokens were given {len(positions)} positions; give one a token")
        rope = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, experts, attend)
        return experts.apply(x, self.norm, self.norm_moe_gen)


class MoTForCausalLM(nn.Module):
    """The decoder with its head over the vocabulary."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.model = MoTModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
