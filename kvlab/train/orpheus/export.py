"""The checkpoint folder, written and read again: a Hugging Face Llama with its tokenizer, and the codec beside it under
snac's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM

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


def read_codec(folder: Path) -> nn.Module:
    """Return the codec that ``write_codec`` wrote.

    Raises:
        LoadError: there is none, or one of another shape.
    """
    try:
        return codec.from_weights(load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"{folder} holds no codec of this training's shape to start from: {error}") from error


def read_into(net: LlamaForCausalLM, folder: Path) -> None:
    """Give ``net`` the weights that ``write`` wrote.

    Raises:
        LoadError: there are none, or those of another shape.
    """
    try:
        net.load_state_dict(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise LoadError(f"{folder} holds no speech model of this training's shape to start from: {error}") from error
