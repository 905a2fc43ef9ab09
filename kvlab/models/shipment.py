"""Weights that travel with kvlab itself: small checkpoints in its folder of shipped inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import LoadError
from kvlab.models.places import sha256_file
from kvlab.shipped import data_dir

WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class ShippedSource:
    """A name whose bytes are a folder of kvlab's shipped inputs; ``sha256`` is its ``folder_digest``."""

    name: str
    folder: str
    sha256: str
    num_bytes: int
    licence: str = "Apache-2.0"

    @property
    def how(self) -> str:
        """Where the bytes come from, in one line."""
        return f"shipped with kvlab in data/{self.folder}"

    def shipped_folder(self) -> Path | None:
        """Return the folder, None where this installation lacks it."""
        path = data_dir() / self.folder
        return path if (path / "config.json").is_file() else None

    def check(self, path: Path) -> None:
        """Refuse a folder with other weights.

        Raises:
            LoadError: it holds other bytes than the name means.
        """
        found = folder_digest(path)
        if found != self.sha256:
            raise LoadError(
                f"{path} does not hold the bytes that {self.name!r} means: SHA-256 {found[:16]}..., expected "
                f"{self.sha256[:16]}...; install kvlab again, or load the folder by its path"
            )


def folder_digest(folder: Path) -> str:
    """Return one SHA-256 of every weight file in a folder and those below it, by name and content."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in WEIGHT_SUFFIXES)
    lines = (f"{p.relative_to(folder).as_posix()} {sha256_file(p)}\n" for p in files)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
