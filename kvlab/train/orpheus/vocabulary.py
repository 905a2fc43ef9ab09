"""Orpheus' vocabulary in small: the ids, the prompt, the frames, the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlab.train.orpheus import corpus

CODEBOOK_SIZE = 512
SLOTS = 7
BEGIN_OF_TEXT_ID, EOT_ID = 254, 255
CUSTOM_TOKEN_BASE = 256
START_OF_SPEECH, END_OF_SPEECH, START_OF_HUMAN, END_OF_HUMAN, START_OF_AI, PAD = 1, 2, 3, 4, 5, 7
FIRST_AUDIO = 10
NUM_CUSTOM_TOKENS = FIRST_AUDIO + SLOTS * CODEBOOK_SIZE
VOCAB_SIZE = CUSTOM_TOKEN_BASE + NUM_CUSTOM_TOKENS


def custom(n: int) -> int:
    """Return the id of ``<custom_token_n>``.

    >>> custom(END_OF_SPEECH)
    258
    """
    return CUSTOM_TOKEN_BASE + n


def settings() -> dict[str, Any]:
    """Return what a reader of the checkpoint must know beside the network's shape: the key ``orpheus`` of its config."""
    return {
        "custom_token_base": CUSTOM_TOKEN_BASE,
        "codebook_size": CODEBOOK_SIZE,
        "begin_of_text_id": BEGIN_OF_TEXT_ID,
        "eot_id": EOT_ID,
        "voices": list(corpus.VOICES),
        "sample_rate": corpus.SAMPLE_RATE,
        "samples_per_frame": corpus.FRAME_SAMPLES,
        "codec": "snac",
    }


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Return the ids that ask for a line, from start of human to start of speech."""
    text = tokenizer(prompt)["input_ids"]
    return [custom(START_OF_HUMAN), *text, EOT_ID, custom(END_OF_HUMAN), custom(START_OF_AI), custom(START_OF_SPEECH)]


def audio_ids(frames: Tensor) -> list[int]:
    """Return the ids of [frames, 7] codes."""
    slots = torch.arange(SLOTS) * CODEBOOK_SIZE + custom(FIRST_AUDIO)
    return cast(list[int], (frames + slots).flatten().tolist())


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a token a word of the corpus, pieces and letters for others, and Orpheus' special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    vocab, merges = _pieces([*corpus.VOICES, *corpus.words()])
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", ignore_merges=True))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]+|[^a-z]"), "isolated")
    core.decoder = decoders.Fuse()
    names = ["<|begin_of_text|>", "<|eot_id|>", *(f"<custom_token_{n}>" for n in range(NUM_CUSTOM_TOKENS))]
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    core.post_processor = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[(names[0], BEGIN_OF_TEXT_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=names[0],
        eos_token=f"<custom_token_{END_OF_SPEECH}>",
        pad_token=f"<custom_token_{PAD}>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _pieces(words: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return letters, then the beginnings of every word up to the whole, and free places up to the begin token."""
    letters = [chr(c) for c in range(32, 127) if not chr(c).isupper()]
    merges = list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))
    tokens = ["<unk>", *letters, *("".join(pair) for pair in merges)]
    tokens += [f"<unused_{n}>" for n in range(BEGIN_OF_TEXT_ID - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}, merges
