from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.weights import load_bagel
from kvlab.train.bagel import autoencoder, card, evaluate, export, network, packing, run, vocabulary
from kvlab.train.bagel.__main__ import main

pytest.importorskip("diffusers", reason="needs the extra bagel")

TEXT = replace(network.CONFIG.text, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, head_dim=16)
TINY = replace(network.CONFIG, text=TEXT)


@pytest.fixture(autouse=True)
def quick_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.sampling, "NUM_TIMESTEPS", 3)
    monkeypatch.setattr(run, "NUM_EVENED", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bagel") / "tiny"
    export.write(folder, network.build(TINY), Autoencoder(autoencoder.CONFIG))
    return folder


def test_the_folder_has_the_files_of_the_release(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "ae.safetensors", "config.json", "ema.safetensors", "llm_config.json", "merges.txt", "tokenizer.json",
        "tokenizer_config.json", "vit_config.json", "vocab.json",
    ]  # fmt: skip


def test_the_network_is_bfloat16_and_the_autoencoder_float32(folder: Path) -> None:
    kinds = {name: {t.dtype for t in load_file(folder / f"{name}.safetensors").values()} for name in ("ema", "ae")}
    assert kinds == {"ema": {torch.bfloat16}, "ae": {torch.float32}}


def test_what_is_loaded_is_the_network_that_was_written(folder: Path) -> None:
    torch.manual_seed(0)
    written = network.build(TINY)
    net, made = load_bagel(folder)
    assert net.config == TINY
    assert made.config == autoencoder.CONFIG
    loaded = dict(net.named_parameters())
    assert all(torch.equal(loaded[name], p.bfloat16().float()) for name, p in written.named_parameters())


def test_the_ids_of_the_config_are_those_of_the_tokenizer(folder: Path) -> None:
    special = json.loads((folder / "config.json").read_text(encoding="utf-8"))["bagel"]["special_ids"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert list(special.values()) == tokenizer.convert_tokens_to_ids(list(vocabulary.OPENING_AND_CLOSING))


def test_it_is_judged_in_every_kind(folder: Path) -> None:
    found = evaluate.evaluate(folder, num=2)
    assert set(card.ROWS) <= set(found)
    assert found["true_pictures"] == {"right": 1.0, "of_other_scenes": 0.0}
    assert found["one_shape"]["right"] == 0  # nobody trained it
    assert all(0 <= share <= 1 for name in card.ROWS if name != "autoencoder" for share in found[name].values())


def test_a_seed_draws_the_same_picture_and_another_another(folder: Path) -> None:
    net, made = load_bagel(folder)
    torch.nn.init.normal_(net.llm2vae.weight, std=0.1)
    texts = vocabulary.Texts(AutoTokenizer.from_pretrained(folder))
    first, again, other = (evaluate.Examiner(net, made, texts, seed).draw(["a red circle"])[0] for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_answers_stop_at_the_closing_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = load_bagel(folder)
    script = {1: 40, 2: 41, 3: vocabulary.SPECIAL.eos}  # by the length of what was said, bos and all

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        script_step = script[len(seen)]
        seen.append(script_step)
        return torch.nn.functional.one_hot(torch.tensor([script_step] * len(hidden)), 512).float()

    seen: list[int] = [0]
    monkeypatch.setattr(net, "logits", logits)
    said = evaluate.sampling.answers(net, [[packing.text([30])], [packing.text([31, 32])]])
    assert said == [[40, 41], [40, 41]]


def test_the_readme_quotes_what_was_measured(folder: Path) -> None:
    found = evaluate.evaluate(folder, num=2)
    card.write(folder, run.Plan(folder, steps=123), found)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "| pictures of one shape | 0.0% |" in readme
    assert "--steps 123" in readme
    assert "Apache-2.0" in readme
    (folder / "README.md").unlink()


# -- command -----------------------------------------------------------------------------------------------------------


def test_the_command_trains_judges_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--autoencoder-steps", "1", "--decoder-steps", "1", "--edits", "2", "--steps", "1", "--requests", "1"]
    assert main(["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(card.ROWS) <= set(found)
    assert (tmp_path / "out" / "README.md").is_file()
    assert main(["--evaluate", str(tmp_path / "out"), "--requests", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_another_folder_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--evaluate", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--out", "a", "--evaluate", "b"]])
def test_training_or_judging_must_be_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "either --out FOLDER to train or --evaluate FOLDER to judge" in capsys.readouterr().err
