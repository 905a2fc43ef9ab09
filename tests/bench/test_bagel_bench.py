"""The bench of pictures, on a tiny random model: what it measures is there and draws the same; speed is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_bagel
import torch

from kvlab.assemble import build_engine
from kvlab.bench.bagel import ContiguousDrawing, run
from kvlab.errors import InputError
from kvlab.models.loading import load_model
from kvlab.spec import draw

pytest.importorskip("diffusers", reason="needs the extra bagel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bagel.write_folder(tmp_path_factory.mktemp("bagel") / "tiny")


def test_every_row_is_measured_and_the_threads_are_given_back(folder: Path) -> None:
    threads = torch.get_num_threads()
    found = json.loads(json.dumps(run(folder, rounds=1, num_timesteps=4)))
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [
        "first_step_hit_vs_cold", "picture_hit_vs_cold", "denoise_steps_vs_contiguous", "served_picture_encoder_calls",
    ]  # fmt: skip
    assert all(row["ours"] > 0 and row["reference"] > 0 for row in list(rows.values())[:3])
    assert (rows["served_picture_encoder_calls"]["ours"], rows["served_picture_encoder_calls"]["ok"]) == (0, True)
    assert found["machine"]["model"].startswith("tiny sha256:")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("settings", [{}, {"cfg_text_scale": 1.0}, {"cfg_interval": (0.0, 1.0), "cfg_renorm": "channel"}])
def test_the_reference_draws_the_same_picture(folder: Path, settings: dict) -> None:
    model = load_model(folder, device="cpu")
    prompt = draw(tiny_bagel.TEXT, num_timesteps=6, **settings)
    alone = ContiguousDrawing(model.net, model.processor.process_prompt(prompt, {"seed": 0}).metadata["plan"])
    with build_engine(model, num_pages=64, page_size=4) as engine, torch.inference_mode():
        drawn = engine.generate(prompt, seed=0).pixels
        grid = model.config.latent_grid(*drawn.shape[:2])
        pixels = ((model.decode_latents(alone.latents(), grid).clamp(-1, 1) + 1) * 127.5).permute(1, 2, 0)  # [h, w, 3]
    assert (pixels - drawn).abs().max() <= 1.001


def test_a_model_that_draws_nothing_is_refused(tmp_path: Path) -> None:
    from tiny_checkpoints import write_folder

    write_folder(tmp_path / "text")
    with pytest.raises(InputError, match="text draws no pictures"):
        run(tmp_path / "text")
