from __future__ import annotations

import re

import pytest

from kvlab.shipped import data_dir
from kvlab.train.bagel import card, evaluate, vocabulary
from kvlab.train.bagel.evaluate import Examiner

pytest.importorskip("diffusers", reason="needs the extra bagel")

FOLDER = data_dir() / "checkpoints" / "bagel-tiny"


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    from transformers import AutoTokenizer

    from kvlab.models.bagel.weights import load_bagel

    return Examiner(*load_bagel(FOLDER), vocabulary.Texts(AutoTokenizer.from_pretrained(FOLDER)), seed=5)


def test_the_shipped_folder_stays_under_25_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 25_000_000


def test_it_draws_held_out_prompts(examiner: Examiner) -> None:
    assert examiner.drawn(("one",), 12)["right"] >= 0.9


def test_it_answers_about_held_out_pictures(examiner: Examiner) -> None:
    assert examiner.answered(12)["right"] >= 0.75


def test_its_ids_are_those_that_training_makes() -> None:
    assert vocabulary.make_tokenizer().get_vocab() == examiner_vocabulary()


def examiner_vocabulary() -> dict[str, int]:
    from transformers import AutoTokenizer

    vocab: dict[str, int] = AutoTokenizer.from_pretrained(FOLDER).get_vocab()
    return vocab


@pytest.mark.slow
def test_the_readme_quotes_what_is_measured_again() -> None:
    found = evaluate.evaluate(FOLDER)
    quoted = dict(re.findall(r"^\| (.+?) \| ([\d.]+)% \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    for name, label in card.ROWS.items():
        measured = next(iter(found[name].values()))
        assert 100 * measured == pytest.approx(float(quoted[label]), abs=5)  # a product's last bits may differ by machine
