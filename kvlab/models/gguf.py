"""The tensors, the config and the tokenizer of a GGUF file, written as a folder that Hugging Face tools read.

Run as ``python -m kvlab.models.gguf SOURCE FOLDER`` this module converts one file and says each tensor as it is done;
``kvlab.models.dense`` runs it so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError, LoadError

SHARD_BYTES = 1 << 30  # bounds what a conversion holds in memory

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, in place of llama3's four numbers


def convert(source: Path, folder: Path, done: Callable[[str], None]) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file into ``folder``.

    Args:
        source: The GGUF file.
        folder: An existing folder.
        done: Told the name of each tensor converted.

    Raises:
        LoadError: the file is damaged, incomplete, or of an architecture that kvlab does not run.
    """
    reader = _open(source)
    tensors = {t.name: t for t in reader.tensors}
    config = dense_config(reader.fields, tensors, source)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_weights(tensors, config, source, folder, done)
    _write_tokenizer(source, folder)


def _open(source: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise LoadError("the gguf package is needed to read GGUF files; run: pip install gguf") from e
    try:
        return GGUFReader(source)
    except Exception as e:  # the reader raises whatever a damaged byte leads it to
        size = source.stat().st_size if source.is_file() else 0
        raise LoadError(f"{source} ({size:,} bytes) is not a whole GGUF file: {_one_line(e)}; get it again") from e


def dense_config(meta: dict[str, Any], tensors: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the config.json that says what a GGUF file's metadata says.

    Raises:
        LoadError: an entry is missing, or asks for something that the text models here do not do.
    """
    read = _Metadata(meta, source)
    arch = read("general.architecture")
    if arch not in ARCHITECTURES:
        raise LoadError(f"{source} is a GGUF file of architecture {arch!r}; kvlab runs {', '.join(ARCHITECTURES)}")
    scaling = read(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise LoadError(f"{source} scales its rotary embedding by {scaling!r}, which kvlab does not read from GGUF files")
    hidden, heads = int(read(f"{arch}.embedding_length")), int(read(f"{arch}.attention.head_count"))
    head_dim = int(read(f"{arch}.attention.key_length", hidden // heads))
    _require_tensors(tensors, int(read(f"{arch}.block_count")), source)
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": int(read(f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(read(f"{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(read(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": int(read(f"{arch}.context_length")),
        "rms_norm_eps": _shortest(read(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(read(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(tensors, head_dim, float(read(f"{arch}.rope.freq_base", 10000.0)), source),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": read("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _end_ids(read),
        "torch_dtype": "float32",
    }


class _Metadata:
    """Reads one metadata entry by name; without a default a missing one is an error."""

    def __init__(self, fields: dict[str, Any], source: Path) -> None:
        self.fields, self.source = fields, source

    def __call__(self, name: str, *default: Any) -> Any:
        if name in self.fields:
            return self.fields[name].contents()
        if default:
            return default[0]
        raise LoadError(f"{self.source} lacks the metadata entry {name!r}; get a complete GGUF file")


def _end_ids(read: _Metadata) -> int | list[int] | None:
    found = {read(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot")} - {None}
    ids = sorted(int(i) for i in found)
    return ids[0] if len(ids) == 1 else ids or None


def _shortest(value: float) -> float:
    """Return the decimal number that a float32 entry was written from: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _rope_scaling(tensors: dict[str, Any], head_dim: int, theta: float, source: Path) -> dict[str, Any] | None:
    """Return the llama3 numbers behind a table of rotary factors, after making sure that they give that table.

    The file keeps only the table; every published model of that kind used low 1, high 4 and 8192 positions.
    """
    if ROPE_FACTORS not in tensors:
        return None
    import numpy as np

    table = np.asarray(tensors[ROPE_FACTORS].data, dtype=np.float64)
    factor, low, high, positions = float(table.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((positions / wavelength - low) / (high - low), 0.0, 1.0)
    if table.shape != wavelength.shape or not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise LoadError(f"{source} holds rotary factors that are not those of llama3; load the model's safetensors instead")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 3),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": positions,
    }


def dense_name(name: str, source: Path) -> str:
    """Return the tensor name that Hugging Face folders use for a GGUF tensor.

    >>> dense_name("blk.3.ffn_up.weight", Path("a.gguf"))
    'model.layers.3.mlp.up_proj.weight'
    """
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise LoadError(f"{source} holds the tensor {name!r}, which is no part of a Llama or Qwen2 decoder as kvlab runs it")


def _require_tensors(tensors: dict[str, Any], num_layers: int, source: Path) -> None:
    wanted = ["token_embd.weight", "output_norm.weight"]
    wanted += [f"blk.{i}.{part}.weight" for i in range(num_layers) for part in LAYER_NAMES]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise LoadError(
            f"{source} lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]!r}; get a complete GGUF file"
        )


def _write_weights(
    tensors: dict[str, Any], config: dict[str, Any], source: Path, folder: Path, done: Callable[[str], None]
) -> None:
    from safetensors.numpy import save_file

    shards = _shards([t for name, t in tensors.items() if name != ROPE_FACTORS])
    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        dense = {}
        for tensor in shard:
            dense[dense_name(tensor.name, source)] = _dense_values(tensor, config, source)
            done(tensor.name)
        save_file(dense, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(dense, file)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _shards(tensors: list[Any]) -> list[list[Any]]:
    """Cut the tensors into runs of at most SHARD_BYTES of float32 (a bigger tensor is alone)."""
    shards: list[list[Any]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = int(tensor.n_elements) * 4
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


def _dense_values(tensor: Any, config: dict[str, Any], source: Path) -> Any:
    """Return a tensor's values as float32 in the order that a Hugging Face folder has them."""
    import numpy as np
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except Exception as e:
        raise LoadError(f"{source}: {tensor.name} ({tensor.tensor_type.name}) cannot be dequantised: {_one_line(e)}") from e
    if not np.isfinite(values).all():
        raise LoadError(f"{source}: {tensor.name} holds values that are no numbers; the file is damaged, get it again")
    part = tensor.name.split(".")[-2]
    if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads"] if part == "attn_q" else config["num_key_value_heads"]
        values = halves_from_pairs(values, heads)
    return np.ascontiguousarray(values)


def halves_from_pairs(values: Any, num_heads: int) -> Any:
    """Undo the row order of llama's query and key projections in GGUF.

    There the two values rotated together are neighbours; in Hugging Face folders they lie half a head apart.

    >>> import numpy as np
    >>> halves_from_pairs(np.arange(8), 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as e:
        raise LoadError(f"the tokenizer in {source} cannot be read: {_one_line(e)}; get it again") from e
    tokenizer.save_pretrained(folder)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main(arguments: list[str]) -> int:
    """Convert ``arguments[0]`` into the folder ``arguments[1]``; exit 2 with one line on stderr when it cannot be done."""
    try:
        convert(Path(arguments[0]), Path(arguments[1]), lambda name: print(name, flush=True))
    except KvlabError as e:
        sys.stderr.write(f"{_one_line(e).partition(': ')[2]}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
