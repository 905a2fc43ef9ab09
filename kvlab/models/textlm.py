"""TextLM: the Llama / Qwen2 decoder. One class; what differs between the families are fields of TextConfig."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvlab.attention.base import AttentionBackend
from kvlab.errors import IntegrityError, LoadError
from kvlab.models.fields import count_field, list_field, mapping_field, number_field, switch_field
from kvlab.models.layers import GatedMLP, Linear, PagedSelfAttention, RMSNorm, Rope, RopeScaling, RotaryEmbedding
from kvlab.options import is_whole
from kvlab.spec import RowInputs

FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True)
class TextConfig:
    """What a Llama or Qwen2 checkpoint says about its network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_seq_len",
        ):  # fmt: skip
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise LoadError(f"config field {name} is {value!r}; a positive whole number is needed")
        if self.num_heads % self.num_kv_heads:
            raise LoadError(f"{self.num_heads} attention heads do not share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise LoadError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of values")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TextConfig:
        """Read the content of a config.json.

        Raises:
            LoadError: A field is missing, or asks for something this network does not do.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise LoadError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
        _refuse_unsupported(config, family)
        num_heads, hidden_size = count_field(config, "num_attention_heads"), count_field(config, "hidden_size")
        rope = _rope_fields(config)
        return cls(
            vocab_size=count_field(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=count_field(config, "intermediate_size"),
            num_layers=count_field(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=count_field(config, "num_key_value_heads", num_heads),
            head_dim=count_field(config, "head_dim", hidden_size // num_heads),
            max_seq_len=count_field(config, "max_position_embeddings"),
            rms_norm_eps=number_field(config, "rms_norm_eps", 1e-6),
            rope_theta=number_field(rope, "rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            qkv_bias=family == "qwen2",
            tied=switch_field(config, "tie_word_embeddings", False),
        )


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    layers = count_field(config, "num_hidden_layers")
    slides = switch_field(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    unslid = config.get("max_window_layers") or 0
    if not is_whole(unslid):
        raise LoadError(f"config field max_window_layers is {unslid!r}; a whole number is needed")
    refused = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        # Llama's flag puts a bias on the output projection too, and Qwen2 always has its q, k and v biases.
        "attention_bias": switch_field(config, "attention_bias", family == "qwen2") != (family == "qwen2"),
        "mlp_bias": switch_field(config, "mlp_bias", False),
        "sliding_window": slides and unslid < layers,
        "layer_types": any(kind != "full_attention" for kind in list_field(config, "layer_types")),
        "partial_rotary_factor": config.get("partial_rotary_factor") not in (None, 1, 1.0),
        "quantization_config": bool(config.get("quantization_config")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = config.get(name)
            raise LoadError(f"config field {name} is {value!r}, which this network does not do for a {family} checkpoint")


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope fields in one mapping, wherever the config's version keeps them."""
    if config.get("rope_scaling") and config.get("rope_parameters"):
        raise LoadError("config has both rope_scaling and rope_parameters, and they may disagree; keep one of them")
    fields = mapping_field(config, "rope_scaling") | mapping_field(config, "rope_parameters")
    if fields.get("rope_theta") is None:
        fields["rope_theta"] = config.get("rope_theta")
    return fields


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise LoadError(f"config field rope_type is {kind!r}; this network does 'default' and 'llama3'")
    return RopeScaling(
        factor=number_field(rope, "factor"),
        low_freq_factor=number_field(rope, "low_freq_factor"),
        high_freq_factor=number_field(rope, "high_freq_factor"),
        original_max_positions=count_field(rope, "original_max_position_embeddings"),
    )


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the normed residual stream and added to it."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = PagedSelfAttention(
            layer,
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, rope: Rope, attention: AttentionBackend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attention)
        return x + self.mlp(self.post_attention_layernorm(x))

    def checkpoint_slices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a checkpoint with the part of a parameter it fills."""
        yield "input_layernorm.weight", self.input_layernorm.weight
        yield from ((f"self_attn.{name}", part) for name, part in self.self_attn.checkpoint_slices())
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight
        yield from ((f"mlp.{name}", part) for name, part in self.mlp.checkpoint_slices())


class TextLM(nn.Module):
    """A causal language model over pages. Build it with ``allocate``, then fill it with ``load_weights``."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    @torch.inference_mode(False)  # inference tensors count no versions, and a change of weights must be seen
    def allocate(cls, config: TextConfig, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> TextLM:
        """Return a network whose weights take their memory once and hold nothing yet."""
        with torch.device("meta"):
            net = cls(config).to(dtype)
        net.to_empty(device=device)
        for module in net.modules():
            if isinstance(module, Linear):
                module.store_by_input()
        if config.tied:
            net.embed_tokens.weight = net.lm_head.weight
        return net.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @torch.inference_mode()
    def forward(self, rows: Sequence[RowInputs], attention: AttentionBackend) -> list[Tensor | None]:
        """Run one step and write its K and V.

        Args:
            rows: In the order of the tables ``attention`` was begun with.
            attention: A backend after ``begin``.

        Returns:
            For each row its logits, or None where none are wanted.

        Shapes:
            logits: [wanted, vocab_size] float32 (float64 from a float64 network).
        """
        for row in rows:
            if len(row.ids) != len(row.positions):
                raise IntegrityError(f"a row has {len(row.ids)} ids and {len(row.positions)} positions")
        ids = torch.tensor(list(chain.from_iterable(row.ids for row in rows)), device=self.device)  # [tokens]
        positions = torch.tensor(list(chain.from_iterable(row.positions for row in rows)), device=self.device)
        x = self.embed_tokens(ids)  # [tokens, hidden_size]
        rope = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, attention)
        return self._logits(x, rows)

    def _logits(self, x: Tensor, rows: Sequence[RowInputs]) -> list[Tensor | None]:
        starts = accumulate((len(row.ids) for row in rows), initial=0)
        spans = [_wanted(row, start) for row, start in zip(rows, starts, strict=False)]
        wanted = [token for span in spans for token in span]
        if not wanted:
            return [None] * len(rows)
        if len(wanted) < len(x):
            x = x[torch.tensor(wanted, device=x.device)]  # [wanted, hidden_size]
        logits = self.lm_head(self.norm(x))  # [wanted, vocab_size]
        parts = logits.to(torch.promote_types(logits.dtype, torch.float32)).split([len(span) for span in spans])
        return [None if row.logits_from is None else part for row, part in zip(rows, parts, strict=True)]

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint in, one tensor at a time, under the names Hugging Face gives them.

        Raises:
            LoadError: A tensor is missing, unknown, given twice, not of floats, or of another shape.

        Changes:
            The weights; after an error they are part old, part new.
        """
        targets = dict(self._checkpoint_slices())
        loaded: set[str] = set()
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tied):
                continue
            if name not in targets:
                raise LoadError(f"tensor {name!r} has no place in this network; is config.json of the same checkpoint?")
            if name in loaded:
                raise LoadError(f"tensor {name!r} comes twice")
            _copy_weight(name, targets[name], tensor)
            loaded.add(name)
        missing = [name for name in targets if name not in loaded]
        if missing:
            shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            raise LoadError(f"{len(missing)} of {len(targets)} tensors are missing from the checkpoint: {shown}")

    def _checkpoint_slices(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embed_tokens.weight
        for i, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            for name, part in layer.checkpoint_slices():
                yield f"model.layers.{i}.{name}", part
        yield "model.norm.weight", self.norm.weight
        if not self.config.tied:
            yield "lm_head.weight", self.lm_head.weight


def _wanted(row: RowInputs, start: int) -> range:
    """Return the packed indices of the tokens of a row whose logits are wanted."""
    return range(0) if row.logits_from is None else range(start, start + len(row.ids))[row.logits_from :]


@torch.no_grad()
def _copy_weight(name: str, target: Tensor, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise LoadError(f"tensor {name!r} is {tensor.dtype}, not floats; load a checkpoint that is not quantised")
    if tensor.shape != target.shape:
        raise LoadError(f"tensor {name!r} has shape {list(tensor.shape)} where {list(target.shape)} is needed")
    target.copy_(tensor)
