"""kvlab doctor tells what is there and what to install for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvlab
from kvlab import cli, doctor
from kvlab.errors import install_command


@pytest.fixture(scope="module")
def findings() -> dict:
    return doctor.examine()


def test_findings_are_plain_json(findings: dict) -> None:
    assert json.loads(json.dumps(findings)) == findings


def test_versions_are_those_installed(findings: dict) -> None:
    assert findings["kvlab"]["version"] == kvlab.__version__
    assert findings["packages"]["torch"] == torch.__version__


def test_the_processor_is_always_a_device_and_torch_always_a_backend(findings: dict) -> None:
    assert findings["devices"][-1]["device"] == "cpu"
    assert findings["backends"]["torch"] == {"usable": True, "why_not": None}


def test_a_backend_is_usable_or_says_why_not(findings: dict) -> None:
    assert all(backend["usable"] == (backend["why_not"] is None) for backend in findings["backends"].values())


def test_memory_there_is_positive_and_at_most_all(findings: dict) -> None:
    assert 0 < findings["memory"]["available_bytes"] <= findings["memory"]["total_bytes"]


def test_an_absent_library_names_its_extra_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "plotly" else real(name))
    lab = doctor.extras()["lab"]
    assert "plotly" in lab["missing"]
    assert lab["install"] == install_command("lab")
    assert f"plotly; run: {install_command('lab')}" in doctor.render(doctor.examine()).replace("missing ", "")


def test_weights_are_looked_for_and_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    by_name = {model["name"]: model["path"] for model in doctor.weights()}
    assert "smollm2-135m" in by_name
    placed = tmp_path / "models" / "smollm2-135m.gguf"
    placed.parent.mkdir()
    placed.write_bytes(b"GGUF")
    assert {model["name"]: model["path"] for model in doctor.weights()}["smollm2-135m"] == str(placed)
    assert not (tmp_path / "cache").exists()


def test_a_wheel_reads_its_needs_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    in_checkout = doctor.requirements()
    lines = [f'{name}>=1; extra == "{extra}"' if extra else name for extra, group in in_checkout.items() for name in group]
    monkeypatch.setattr("kvlab.shipped.is_checkout", lambda: False)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert doctor.requirements() == in_checkout


def test_the_text_names_every_model_backend_and_extra(findings: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    wanted = [model["name"] for model in findings["weights"]] + list(findings["backends"]) + list(findings["extras"])
    assert [name for name in wanted if f"  {name}" not in shown] == []
