"""Tiny checkpoints in every form that kvlab loads: folders, sharded folders, GGUF files, and a character tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

BEGIN, END = "<s>", "</s>"
WITH_BEGIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITHOUT_BEGIN = WITH_BEGIN.removeprefix("{{ bos_token }}")
VOCAB_SIZE = 102
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def make_tokenizer(template: str | None = WITH_BEGIN, *, adds_begin: bool = True) -> PreTrainedTokenizerFast:
    """A character tokenizer with the merges an, zi, anzi, Han: "Hanzi" is tokenised to H + anzi, and Han + zi exist too."""
    characters = [chr(c) for c in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<unk>", BEGIN, END, *characters, "an", "zi", "anzi", "Han"])}
    merges = [("a", "n"), ("z", "i"), ("an", "zi"), ("H", "an")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    if adds_begin:
        core.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BEGIN, eos_token=END, unk_token="<unk>", chat_template=template
    )


def make_network(family: str = "llama", *, tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    """transformers' own model with random weights, biases included."""
    torch.manual_seed(seed)
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[family]
    net = model_class(config_class(**{**SHAPE, **changes}, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def write_folder(
    folder: Path, family: str = "llama", *, tied: bool = True, shard_size: str = "5GB", tokenizer: bool = True
) -> Any:
    """Save a tiny model as a Hugging Face folder; returns the model."""
    net = make_network(family, tied=tied)
    net.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return net


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order in which llama's q and k lie in GGUF: row 2 i of a head is row i, row 2 i + 1 is row i + half."""
    half = values.shape[0] // heads // 2
    rows = [head * 2 * half + i + part * half for head in range(heads) for i in range(half) for part in (0, 1)]
    return values[rows]


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    tied: bool = True,
    leave_out: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, str] | None = None,
    theta: float = 10000.0,
) -> Any:
    """Write a tiny model as a GGUF file; returns transformers' model with the same weights."""
    import gguf

    net = make_network(family, tied=tied)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    for name, value in (metadata or {}).items():
        writer.add_string(name, value)
    _add_tokens(writer)
    tensors = {gguf_name(name): t.detach().numpy() for name, t in net.state_dict().items()}
    if tied:
        tensors.pop("output.weight", None)
    for name, values in {**tensors, **(extra or {})}.items():
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
        if family == "llama" and heads:
            values = interleaved(values, SHAPE[heads])
        if name != leave_out:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return net


def _add_tokens(writer: Any) -> None:
    characters = ["Ġ", *(chr(c) for c in range(33, 127))]
    tokens = ["<unk>", BEGIN, END, *characters, "an", "zi", "anzi", "Han"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a n", "z i", "an zi", "H an"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(WITHOUT_BEGIN)
