"""Where these tests look for weights: a cache folder of their own, or the one of whoever runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_USERS = {name: os.environ.get(name) for name in ("KVLAB_CACHE", "KVLAB_MODELS")}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no other place to look."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVLAB_MODELS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def users_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places that the environment names, where real weights may lie."""
    for name, value in _USERS.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
