"""TextModel: a text network as the engine sees it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from kvlab.attention.base import AttentionBackend
from kvlab.attention.store import DTYPES
from kvlab.errors import InputError
from kvlab.models.textlm import TextConfig, TextLM
from kvlab.options import whole
from kvlab.spec import (
    KVLayout,
    Match,
    PrefixStream,
    PromptProcessor,
    PromptRecord,
    RowInputs,
    TextOnly,
    Walk,
    WalkInputs,
    drop_leading,
)

WALKS = {
    "prefill": Walk("prefill", samples=True),
    "decode": Walk("decode", loops=True, samples=True),
}


class TextSchedule(TextOnly):
    """The walks of every model that reads ids and writes ids: prefill, then decode one at a time, in the one stream main."""

    default_options: Mapping[str, Any] = MappingProxyType({})

    def walks(self) -> Mapping[str, Walk]:
        return WALKS

    def kv_labels(self) -> Mapping[str, tuple[str, ...]]:
        return {"kv": ("main",)}

    def prefix_key_streams(self) -> Mapping[str, Mapping[str, PrefixStream]]:
        return {"kv": {"main": PrefixStream("tokens", "ids", "prefill", "decode")}}

    def preprocess_fingerprint(self) -> str:
        return type(self).__name__

    def rope_fields(self) -> Mapping[str, Any]:
        return {}

    def schedule(self, record: PromptRecord, max_tokens: int) -> tuple[str, ...]:
        # The prefill samples the first token, so one token needs no decode.
        return ("prefill", "decode") if max_tokens > 1 else ("prefill",)

    def slots(self, record: PromptRecord, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        prompt_slots = len(record.tensors["tokens"])
        return {"main": (prompt_slots, prompt_slots + max(max_tokens - 1, 0))}

    def prepare_inputs(
        self, walk: str, record: PromptRecord, generated: Sequence[int], state: Any = None, walk_index: int = 0
    ) -> WalkInputs | None:
        if walk == "prefill":
            return WalkInputs({"main": record.tensors["tokens"]})
        if walk == "decode":
            return WalkInputs({"main": generated[-1:]}) if generated else None
        raise InputError(f"{type(self).__name__} runs no walk {walk!r}; its walks are {', '.join(WALKS)}")

    def split_inputs(self, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]) -> WalkInputs:
        return drop_leading(inputs, matches)


class TextModel(TextSchedule):
    """A TextLM with its prompt processor; a spec.ModelSpec.

    Args:
        net: The network, filled.
        processor: Makes ids of prompts and text of ids.
        name: What the user asked for.
        identity: One line that names the bytes of the weights.
        checkpoint_path: Folder or file the weights came from; None keeps the prefix cache shut unless a salt is given.
        pinned_sha256: SHA-256 of all of that file's bytes, where it has been computed; spares reading them again.
        max_seq_len: Longest context, where it is to be shorter than the network's.
    """

    def __init__(
        self,
        net: TextLM,
        processor: PromptProcessor,
        *,
        name: str,
        identity: str,
        checkpoint_path: str | None = None,
        pinned_sha256: str | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        limit = net.config.max_seq_len
        if max_seq_len is not None and whole("max_seq_len", max_seq_len, 1) > limit:
            raise InputError(f"max_seq_len is {max_seq_len}, and {name} has {limit} positions; give at most these")
        self.net = net
        self.processor = processor
        self.name, self.identity = name, identity
        self.config = net.config
        self.vocab_size = net.config.vocab_size
        self.num_heads = net.config.num_heads
        self.max_seq_len = limit if max_seq_len is None else int(max_seq_len)
        self.pinned_sha256 = pinned_sha256
        self._checkpoint_path = checkpoint_path

    def __repr__(self) -> str:
        return f"TextModel({self.name}, {self.config.num_layers} layers, {self.net.dtype}, {self.net.device})"

    def checkpoint_path(self) -> str | None:
        return self._checkpoint_path

    @property
    def device(self) -> str:
        """Where the network computes, and where its pages belong."""
        return str(self.net.device)

    def rope_fields(self) -> Mapping[str, Any]:
        return decoder_rope(self.config)

    def weights_version(self) -> Hashable:
        return weights_version(self.net)

    def kv_layout(self, page_size: int, kv_dtype: str | None = None) -> KVLayout:
        """Return the layout of this model's pages; K and V are stored as computed unless ``kv_dtype`` says otherwise."""
        return decoder_layout(self.config, self.net.dtype, page_size, kv_dtype)

    def forward(self, walk: str, rows: Sequence[RowInputs], attention: AttentionBackend) -> list[Tensor | None]:
        logits: list[Tensor | None] = self.net(rows, attention)
        return logits


def decoder_rope(config: TextConfig) -> Mapping[str, Any]:
    """Return what turns a position into a rotation in a decoder of this config."""
    scaling = config.rope_scaling
    return {"rope_theta": config.rope_theta, "rope_scaling": None if scaling is None else asdict(scaling)}


#: Formats that keys and values can be kept in.
KV_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point)


def decoder_layout(config: TextConfig, dtype: torch.dtype, page_size: int, kv_dtype: str | None = None) -> KVLayout:
    """Return the pages of a decoder that computes in ``dtype`` and stores K and V as ``kv_dtype``, or as computed.

    Raises:
        InputError: ``kv_dtype`` is no format of fractions.
    """
    if kv_dtype not in (None, *KV_DTYPES):
        raise InputError(f"kv_dtype is {kv_dtype!r}; keys and values are kept as {', '.join(KV_DTYPES)}")
    compute_dtype = str(dtype).removeprefix("torch.")
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=kv_dtype or compute_dtype,
        compute_dtype=compute_dtype,
    )


def weights_version(net: nn.Module) -> Hashable:
    """Return a value that changes when a tensor of ``net`` is written in place or replaced, or a hook comes or goes.

    A write through ``tensor.data`` counts no version and is not seen; call ``reset_prefix_cache()`` after one.
    """
    marks: list[Any] = [*torch_module._global_forward_pre_hooks, -1, *torch_module._global_forward_hooks]
    pending: list[nn.Module] = [net]
    while pending:
        module = pending.pop()
        marks += id(module), id(module.__dict__.get("forward")), *module._forward_pre_hooks, -1, *module._forward_hooks
        for tensor in chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                marks += tensor.data_ptr(), _version(tensor)
        pending += (child for child in module._modules.values() if child is not None)
    return tuple(marks)


def _version(tensor: Tensor) -> Any:
    # An inference tensor counts no versions, so it differs from itself: better no cache than a stale one.
    return object() if tensor.is_inference() else tensor._version
