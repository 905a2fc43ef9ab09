"""What a model and its requests take, told from the config alone."""

from __future__ import annotations

import json

import golden_bagel as golden
import pytest
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.sizing import RELEASE
from kvlab.needs import needs, render

pytest.importorskip("diffusers")

MIB = 1 << 20


@pytest.fixture(scope="module")
def release():
    return needs(RELEASE)


def test_pictures_of_the_release_take_what_is_published(release):
    kv = release["kv"]
    assert release["kv_bytes_per_slot"] == 57_344
    assert release["picture"] == [1024, 1024]
    assert kv["one picture, prefill_vae"]["slots"] == 4098
    assert kv["one picture, prefill_vit"]["slots"] == 4902
    assert [kv[f"one picture, {walk}"]["kv_bytes"] // MIB for walk in ("prefill_vae", "prefill_vit")] == [224, 268]
    assert kv["edit of one picture"]["slots"] == 4098 + 4902 + 2 * 102


def test_weights_of_the_release_take_what_is_published(release):
    sizes = json.loads(golden.table("real_sizes.json"))
    assert release["weights_bytes"] == {"network": sizes["ema_bytes_bf16"], "autoencoder": sizes["ae_bytes_fp32"]}


def test_a_config_without_weights_is_enough(tmp_path, release):
    for name, content in BagelConfig().files().items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    told = needs(tmp_path)
    assert {**told, "model": "", "available_bytes": 0} == {**release, "model": "", "available_bytes": 0}
    assert needs(tmp_path, dtype="float32")["kv_bytes_per_slot"] == 2 * 57_344


def test_a_folder_with_weights_tells_its_own_sizes(tmp_path):
    told = needs(golden.write_model(tmp_path / "model"), dtype="float32")
    assert told["weights_bytes"] == {"network": 467_824 * 4, "autoencoder": 589_603 * 4}
    assert told["kv_bytes_per_slot"] == 3 * 2 * 2 * 16 * 4


def test_a_text_model_is_told_too():
    told = needs("orpheus-tiny")
    assert list(told["weights_bytes"]) == ["network"]
    assert told["kv"]["whole context"]["kv_bytes"] == told["kv_bytes_per_slot"] * told["kv"]["whole context"]["slots"]


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(InputError, match=f"nope is no checkpoint folder on this machine.*{RELEASE}"):
        needs("nope")
    with pytest.raises(InputError, match="dtype is 'int4'"):
        needs(RELEASE, dtype="int4")


def test_the_command_tells_it(tmp_path):
    model = str(golden.write_model(tmp_path / "model"))
    shown = CliRunner().invoke(app, ["doctor", "--model", model])
    told = json.loads(CliRunner().invoke(app, ["doctor", "--model", model, "--json"]).stdout)
    assert "KV of one picture, prefill_vit" in shown.stdout
    assert render(told).splitlines()[1:] == shown.stdout.splitlines()[1:]
