"""The bench of speech, on a tiny random model: what it measures is there; how fast it is, is not judged here."""

from __future__ import annotations

import json

import pytest
import tiny_orpheus
import torch

from kvlab.bench.orpheus import run
from kvlab.errors import InputError

pytest.importorskip("snac")


def test_every_row_is_measured_and_the_threads_are_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_STATIC", "1")
    threads = torch.get_num_threads()
    found = json.loads(json.dumps(run(tiny_orpheus.write_folder(tmp_path / "tiny"), rounds=1, minutes=0.05)))
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["first_sound_hit_vs_cold", "audio_s_per_s", "codec_s_per_s_vs_one_go", "long_stream_growth"]
    assert all(rows[name]["ours"] > 0 for name in list(rows)[:3])
    assert found["machine"]["model"].startswith("tiny sha256:")
    assert torch.get_num_threads() == threads


def test_a_model_that_does_not_speak_is_refused(tmp_path):
    from tiny_checkpoints import write_folder

    write_folder(tmp_path / "text")
    with pytest.raises(InputError, match="text does not speak"):
        run(tmp_path / "text")
