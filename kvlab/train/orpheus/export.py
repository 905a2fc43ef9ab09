"""The checkpoint folder: a Hugging Face Llama with its tokenizer, and the codec beside it under snac's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlab.errors import LoadError
from kvlab.train.orpheus import codec
from kvlab.train.orpheus.vocabulary import BEGIN_OF_TEXT_ID, END_OF_SPEECH, PAD, custom, make_tokenizer

#: Orpheus' own sampling.
SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3, "max_new_tokens": 1200}


def write(folder: Path, net: LlamaForCausalLM, codec_net: nn.Module, codec_config: Mapping[str, Any] = codec.CONFIG) -> None:
    """Write network, tokenizer and codec; the network in bfloat16, tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    net.generation_config = GenerationConfig(
        do_sample=True,
        bos_token_id=BEGIN_OF_TEXT_ID,
        eos_token_id=custom(END_OF_SPEECH),
        pad_token_id=custom(PAD),
        **SAMPLING,
    )
    net.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    write_codec(folder / "snac", codec_net, codec_config)


def write_codec(folder: Path, net: nn.Module, config: Mapping[str, Any]) -> None:
    """Write a codec's config and weights, weight norms unfolded as in the release."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().contiguous() for name, tensor in net.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, nn.Module]:
    """Return a checkpoint's network in float32, its tokenizer and its codec.

    Raises:
        LoadError: The folder is no such checkpoint.
    """
    wanted = ("config.json", "model.safetensors", "tokenizer.json", "snac/config.json", "snac/model.safetensors")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise LoadError(f"{folder} is not a checkpoint that kvlab.train.orpheus wrote: it has no {', '.join(missing)}")
    net = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
    return net, tokenizer, read_codec(folder / "snac")


def read_codec(folder: Path) -> nn.Module:
    """Return the codec of a folder."""
    net = codec.build(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.eval().requires_grad_(False)
