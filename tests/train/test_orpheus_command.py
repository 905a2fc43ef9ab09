from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.train.orpheus.__main__ import main


def test_another_folder_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pocketsphinx", reason="needs the extra train")
    assert main(["--evaluate", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--out", "a", "--evaluate", "b"]])
def test_training_or_judging_must_be_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "either --out FOLDER to train or --evaluate FOLDER to judge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "a", "--phrases", "0"], "'0' is no whole number of at least 2"),
        (["--evaluate", "a", "--threads", "0"], "'0' is no whole number of at least 1"),
        (["--out", "a", "--speech-steps", "-1"], "'-1' is no whole number of at least 1"),
        (["--out", "a", "--seed", "x"], "'x' is no whole number of at least 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
