from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvlab.models.bagel.prompting import THINK_THEN_DRAW
from kvlab.train.bagel import edits, questions, scenes, vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return vocabulary.make_tokenizer()


def test_the_four_tokens_have_the_ids_of_the_config(tokenizer: PreTrainedTokenizerFast) -> None:
    special = vocabulary.SPECIAL
    ids = tokenizer.convert_tokens_to_ids(list(vocabulary.OPENING_AND_CLOSING))
    assert ids == [special.bos, special.eos, special.start_of_image, special.end_of_image]


def test_every_text_of_training_reads_back(tokenizer: PreTrainedTokenizerFast) -> None:
    draw = random.Random(9)
    told = [text for turn in questions.any_chat(draw) for text in (turn.asked, turn.answer)]
    told += [*scenes.captions(scenes.any_scene(draw)), edits.any_edit(draw).text, THINK_THEN_DRAW]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in told] == told


def test_any_text_reads_back(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Grüße, 世界!\n\tzebra"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_scenes_are_one_token_each(tokenizer: PreTrainedTokenizerFast) -> None:
    words = [*scenes.COLOURS, *scenes.BACKGROUNDS, *scenes.SHAPES, "background"]
    assert {word for word in words if len(tokenizer.encode(f" {word}")) != 1} == set()


def test_encoding_adds_no_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert not set(tokenizer.encode("a red circle")) & set(range(5))


def test_it_is_made_alike_every_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert vocabulary.make_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) <= vocabulary.VOCAB_SIZE


def test_the_files_are_those_of_the_release_and_load(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    vocabulary.write(tmp_path, tokenizer)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "make the circle green"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))["Ġgreen"] == tokenizer.encode(" green")[0]


def test_texts_are_encoded_once(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = vocabulary.Texts(tokenizer)
    assert texts.words(texts.ids("two")) == "two"
    assert texts.ids("two") is texts.ids("two")
