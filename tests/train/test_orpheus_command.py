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
