"""The tokenizer: byte pairs learned from the sentences about scenes, with BAGEL's four tokens that open and close."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from kvlab.models.bagel.config import SpecialIds
from kvlab.models.bagel.prompting import THINK_THEN_DRAW
from kvlab.train.bagel import edits, questions, scenes

PAD = "<|endoftext|>"
OPENING_AND_CLOSING = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL = SpecialIds(bos=1, eos=2, start_of_image=3, end_of_image=4)
VOCAB_SIZE = 512
NUM_SENTENCES = 4000
LEARNED_TIMES = 20


def sentences(num: int = NUM_SENTENCES) -> Iterator[str]:
    """Yield sentences of every kind, always the same."""
    draw = random.Random(0)
    yield from [THINK_THEN_DRAW] * LEARNED_TIMES
    for _ in range(num):
        scene = scenes.any_scene(draw)
        yield draw.choice(scenes.captions(scene))
        yield edits.any_edit(draw).text
        yield questions.plan(scene)
        for turn in (*questions.any_chat(draw), questions.description(scene)):
            yield turn.asked
            yield turn.answer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; made anew it has the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokens = [AddedToken(token, special=True, normalized=False) for token in (PAD, *OPENING_AND_CLOSING)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=tokens, initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=OPENING_AND_CLOSING[0],
        eos_token=OPENING_AND_CLOSING[1],
        pad_token=PAD,
        additional_special_tokens=list(OPENING_AND_CLOSING),
        clean_up_tokenization_spaces=False,
    )


def write(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the tokenizer's files, those of the release among them."""
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))


class Texts:
    """Texts as ids, each remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return a text's ids, without the tokens around it."""
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]

    def words(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode(ids))
