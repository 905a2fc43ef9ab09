"""Names whose weights travel with kvlab: found, checked byte for byte, and named when they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_orpheus

import kvlab
from kvlab.errors import FetchError, LoadError
from kvlab.models import registry, shipment
from kvlab.models.shipment import ShippedSource, folder_digest

pytestmark = pytest.mark.usefixtures("own_cache")
pytest.importorskip("snac")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a speaking model under a name of its own."""
    folder = tiny_orpheus.write_folder(tmp_path / "data" / "checkpoints" / "speaks")
    monkeypatch.setattr(shipment, "data_dir", lambda: tmp_path / "data")
    source = ShippedSource("speaks", "checkpoints/speaks", folder_digest(folder), 4_000_000)
    monkeypatch.setitem(registry.KNOWN, "speaks", source)
    return folder


def test_a_shipped_name_loads_without_network(shipped):
    with kvlab.load("speaks", num_pages=64, device="cpu") as engine:
        assert engine.model.name == "speaks"
        assert engine.generate("Hi", max_tokens=1).prompt_tokens > 0
    assert registry.known()["speaks"] == shipped
    assert registry.KNOWN["speaks"].how == "shipped with kvlab in data/checkpoints/speaks"


@pytest.mark.parametrize("file", ["model.safetensors", "snac/pytorch_model.bin"])
def test_other_bytes_are_refused_those_of_the_codec_too(shipped, file):
    with (shipped / file).open("ab") as f:
        f.write(b"x")
    with pytest.raises(LoadError, match="does not hold the bytes that 'speaks' means"):
        kvlab.load("speaks")


def test_a_missing_folder_is_named(shipped, tmp_path):
    (shipped / "config.json").unlink()
    with pytest.raises(FetchError, match=r"'speaks' is shipped with kvlab in data/checkpoints/speaks and is not there"):
        kvlab.load("speaks")
