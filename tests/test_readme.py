"""The README's ten lines run as they stand."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_ten_lines_run_and_turn_two_is_served_from_turn_one(capsys: pytest.CaptureFixture[str]) -> None:
    from kvlab.models import registry

    if registry.locate("smollm2-135m") is None:
        pytest.skip("smollm2-135m is not here; run: kvlab fetch smollm2-135m")
    code, figure, *_ = BLOCKS
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    a, b, engine = names["a"], names["b"], names["engine"]
    engine.check()
    assert b.cached_tokens >= 0.8 * (a.prompt_tokens + len(a.ids))
    assert f"{b.cached_tokens} of {b.prompt_tokens} prompt tokens" in capsys.readouterr().out
    pytest.importorskip("plotly", reason="the figure needs the extra lab")
    exec(compile(figure, "README.md", "exec"), names)


def test_a_second_question_about_a_picture_computes_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers", reason="pictures need the extra bagel")
    monkeypatch.chdir(tmp_path)
    names: dict = {"kvlab": importlib.import_module("kvlab")}
    exec(compile(BLOCKS[2], "README.md", "exec"), names)
    names["painter"].check()
    again = names["again"]
    assert again.encoder_calls == 0
    assert again.cached_tokens > again.prompt_tokens // 2
    assert capsys.readouterr().out.startswith(again.text)
    assert (tmp_path / "scene.png").read_bytes().startswith(b"\x89PNG")


def test_a_sentence_said_again_has_the_same_samples_from_cached_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("snac", reason="speech needs the extra audio")
    monkeypatch.chdir(tmp_path)
    names: dict = {"kvlab": importlib.import_module("kvlab")}
    exec(compile(BLOCKS[3], "README.md", "exec"), names)
    names["speaker"].check()
    cold, hit = names["cold"].generation, names["hit"].generation
    assert (cold.cached_tokens, hit.cached_tokens) == (0, (hit.prompt_tokens - 1) // 4 * 4)
    assert capsys.readouterr().out == f"{hit.cached_tokens} True\n"
    assert (tmp_path / "star.wav").stat().st_size > 20_000


def test_both_commands_set_themselves_up() -> None:
    commands = re.findall(r"<!-- command: \w+ -->\n```bash\n(.*)\n```", README)
    assert len(commands) == 2
    start = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e "
    assert [command for command in commands if not command.startswith(start)] == []
