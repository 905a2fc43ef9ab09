"""Tiny Orpheus checkpoints in the released layout: the released ids over a random Llama, and the codec of tests/golden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden" / "orpheus"
BEGIN = "<|begin_of_text|>"
SPECIAL = {
    BEGIN: 128000,
    "<|eot_id|>": 128009,
    **{f"<custom_token_{n}>": 128256 + n for n in (*range(10), 10, 4106, 8202, 12298, 16394, 20490, 24586)},
}
SMALL = {"custom_token_base": 190, "codebook_size": 4096, "eot_id": 130, "voices": ["tara", "leo", "zoe"], "codec": "snac"}
SMALL_SPECIAL = {BEGIN: 129, "<|eot_id|>": 130, **{f"<custom_token_{n}>": 190 + n for n in range(10)}}


def make_tokenizer(special: dict[str, int] = SPECIAL) -> PreTrainedTokenizerFast:
    """One id for each ASCII character, its code point, and the special tokens."""
    vocab = {chr(i): i for i in range(128)} | special
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.Fuse()
    core.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, special[BEGIN])])
    names = [name for name in special if name != BEGIN]
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BEGIN, additional_special_tokens=names)


def write_codec(folder: Path, *, as_torch: bool = True, **changes: Any) -> None:
    """Write the golden codec as the release does: config.json and pytorch_model.bin."""
    folder.mkdir(parents=True)
    config = json.loads((GOLDEN / "tiny_snac" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    weights = GOLDEN / "tiny_snac" / "model.safetensors"
    if as_torch:
        torch.save(load_file(weights), folder / "pytorch_model.bin")
    else:
        shutil.copy(weights, folder / "model.safetensors")


def write_folder(
    folder: Path, *, released: bool = False, with_codec: bool = True, shard_size: str = "5GB", **orpheus: Any
) -> Path:
    """Write a random Llama as an Orpheus folder; ``released`` ones have the released ids and no entry "orpheus"."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=156940 if released else SMALL["custom_token_base"] + 10 + 7 * SMALL["codebook_size"],
        hidden_size=8 if released else 32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    )
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    net.save_pretrained(folder, max_shard_size=shard_size)
    make_tokenizer(SPECIAL if released else SMALL_SPECIAL).save_pretrained(folder)
    if not released:
        path = folder / "config.json"
        entry = SMALL | orpheus
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"orpheus": entry}), encoding="utf-8")
    if with_codec:
        write_codec(folder / "snac")
    return folder
