"""kvlab.load knows a BAGEL folder, and what is missing or does not belong together is named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import golden_bagel as golden
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from watched_bagel import drawing, picture

import kvlab
from kvlab.errors import InputError, LoadError, MissingExtraError
from kvlab.models.bagel.loading import SPECIAL_TOKENS, weights_bytes
from kvlab.models.bagel.spec import BagelModel

pytest.importorskip("diffusers")
pytest.importorskip("PIL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return golden.write_model(tmp_path / "ein Modell ü")


def write_tokenizer(folder: Path, **moved: int) -> None:
    """Write a tokenizer of words; ``moved`` gives special tokens other ids."""
    ids = {"bos": 500, "eos": 501, "start_of_image": 502, "end_of_image": 503} | moved
    words = {word: i for i, word in enumerate(["a", "red", "circle", "how", "many"])}
    special = {token: ids[name] for name, token in SPECIAL_TOKENS.items()}
    tokenizer = Tokenizer(models.WordLevel(words | special | {"?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)


def test_a_folder_is_recognised_and_answers_and_draws(folder):
    write_tokenizer(folder)
    with kvlab.load(folder, num_pages=100, page_size=4) as engine:
        assert isinstance(engine.model, BagelModel)
        assert engine.model.name == folder.name
        asked = engine.generate(kvlab.ask(picture(), "how many"), max_tokens=3)
        drawn = engine.generate(kvlab.draw("a red circle", num_timesteps=3, size=(32, 48)), seed=1)
        assert len(asked.ids) == 3
        assert drawn.pixels.shape == (32, 48, 3)
        assert drawn.model == engine.model.identity
        assert drawn.prompt_ids == (500, 0, 1, 2, 501)


def test_without_a_tokenizer_prompts_are_ids(folder):
    with kvlab.load(folder, num_pages=100) as engine:
        assert len(engine.generate([500, 7, 501], max_tokens=2).ids) == 2
        with pytest.raises(InputError, match="no tokenizer"):
            engine.generate(kvlab.ask("how many"))


def test_a_worker_process_reads_pictures(folder):
    with kvlab.load(folder, num_pages=100, preprocess="process") as engine:
        assert engine.generate(kvlab.ask(picture()), max_tokens=2).prompt_tokens == 17


def test_bfloat16_runs_with_an_autoencoder_in_float32(folder):
    with kvlab.load(folder, num_pages=100, page_size=4, dtype="bfloat16") as engine:
        assert engine.model.net.dtype == torch.bfloat16
        assert next(engine.model.autoencoder.parameters()).dtype == torch.float32
        prompt = drawing("06_edit_nocfg")
        prompt = kvlab.spec.Mixed((prompt.parts[0], kvlab.spec.Kept((7, 8))), "picture", settings=prompt.settings)
        first, second = engine.generate(prompt), engine.generate(prompt)
        assert second.cached_tokens > 0
        assert (first.pixels.int() - second.pixels.int()).abs().max() <= 8


@pytest.mark.parametrize("part", ["ae", "ema"])
def test_a_missing_weight_file_is_named(folder, part):
    (folder / f"{part}.safetensors").unlink()
    with pytest.raises(LoadError, match=rf"{part}\.safetensors.*the {'autoencoder' if part == 'ae' else 'network'}'s weights"):
        kvlab.load(folder)


@pytest.mark.parametrize("file", ["vit_config.json", "llm_config.json"])
def test_a_damaged_config_is_named(folder, file):
    (folder / file).write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match=file):
        kvlab.load(folder)


def test_a_missing_config_is_named(folder):
    (folder / "vit_config.json").unlink()
    with pytest.raises(LoadError, match=r"vit_config\.json"):
        kvlab.load(folder)


def test_a_tokenizer_of_another_checkpoint_is_refused(folder):
    write_tokenizer(folder, start_of_image=77)
    with pytest.raises(LoadError, match=r"<\|vision_start\|> is id 77 and the config's start_of_image is 502"):
        kvlab.load(folder)


def test_a_context_longer_than_the_models_is_refused(folder):
    with pytest.raises(InputError, match="has 32768 positions"):
        kvlab.load(folder, max_seq_len=40000)
    with kvlab.load(folder, max_seq_len=10) as engine, pytest.raises(InputError, match="the context has 10"):
        engine.generate(list(range(10)), max_tokens=1)


def test_an_absent_autoencoder_library_names_its_extra(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "diffusers.models.autoencoders.autoencoder_kl", None)
    with pytest.raises(MissingExtraError, match=r"\[bagel\]"):
        kvlab.load(folder)


def test_two_folders_of_the_same_bytes_are_one_model_and_another_autoencoder_is_another(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    data = bytearray((other / "ae.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "ae.safetensors").write_bytes(data)
    same = shutil.copytree(folder, tmp_path / "same" / folder.name)
    identities = []
    for place in (folder, same, other):
        with kvlab.load(place, num_pages=10) as engine:
            identities.append(engine.model.pinned_sha256)
    assert identities[0] == identities[1] != identities[2]


def test_memory_is_told_by_part(folder):
    numbers = weights_bytes(folder, torch.bfloat16)
    assert numbers == {"network": 467_824 * 2, "autoencoder": 589_603 * 4}


def test_the_processor_is_light(folder):
    with kvlab.load(folder, num_pages=10) as engine:
        assert len(pickle.dumps(engine.model.processor)) < 10_000


def test_sizes_of_another_checkpoint_are_refused_before_a_picture_comes(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["bagel"]["vit_transform"]["max_image_size"] = 980
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(LoadError, match="980 pixels a side for the vision tower and its table of positions holds 140"):
        kvlab.load(folder)


def test_special_ids_of_another_checkpoint_are_refused(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["bagel"]["special_ids"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(LoadError, match="bos is id 151644 and the vocabulary has 512"):
        kvlab.load(folder)
