"""Where weights may lie on this machine, and how bytes are checked and put there whole."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from kvlab.errors import LoadError

log = logging.getLogger("kvlab.models")

#: Takes one line for the user about something that is about to take time or network.
Say: TypeAlias = Callable[[str], None]

PARTIAL = ".partial-"  # prefix of whatever is still being written; never read
STALE_PARTIAL_S = 24 * 3600  # a partial this old has lost its writer


def announce(line: str) -> None:
    """Log ``line`` and write it to stderr, so that no download is ever silent."""
    log.info(line)
    if sys.stderr is not None:
        sys.stderr.write(f"kvlab: {line}\n")
        sys.stderr.flush()


def cache_folder() -> Path:
    """Return kvlab's cache folder: ``KVLAB_CACHE``, or the platform's folder for user caches."""
    if given := os.environ.get("KVLAB_CACHE"):
        return Path(given).expanduser()
    return user_caches(sys.platform, os.environ, Path.home()) / "kvlab"


def user_caches(platform: str, env: os._Environ[str] | dict[str, str], home: Path) -> Path:
    """Return the folder where a platform keeps the caches of a user.

    >>> user_caches("darwin", {}, Path("/Users/ada")).as_posix()
    '/Users/ada/Library/Caches'
    >>> user_caches("linux", {"XDG_CACHE_HOME": "/big/cache"}, Path("/home/ada")).as_posix()
    '/big/cache'
    """
    if platform == "win32":
        return Path(env.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if platform == "darwin":
        return home / "Library" / "Caches"
    return Path(env.get("XDG_CACHE_HOME") or home / ".cache")


def model_folders() -> list[Path]:
    """Return the folders searched for names: those of ``KVLAB_MODELS`` in order, then kvlab's own."""
    given = os.environ.get("KVLAB_MODELS", "")
    return [Path(p).expanduser() for p in given.split(os.pathsep) if p] + [cache_folder() / "weights"]


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a whole file in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def require_sha256(path: Path, expected: str, name: str, remedy: str) -> None:
    """Check that ``path`` holds the bytes that ``name`` means.

    Raises:
        LoadError: it holds other bytes.
    """
    found = sha256_file(path)
    if found != expected:
        raise LoadError(
            f"{path} does not hold the bytes that {name!r} means: SHA-256 {found[:16]}... ({path.stat().st_size:,} bytes), "
            f"expected {expected[:16]}...; {remedy}"
        )


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes ``target`` in one move if the block ends without an error.

    When another process was faster, its folder stays and this one is dropped.
    """
    partial = _make_partial(target.parent)
    try:
        yield partial
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes ``target`` in one move if the block ends without an error."""
    partial = _make_partial(target.parent)
    try:
        yield partial / target.name
        os.replace(partial / target.name, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_writable(folder: Path, variable: str = "KVLAB_CACHE") -> None:
    """Make ``folder`` if it is absent and check that files can be put there.

    Raises:
        LoadError: it cannot be; the message names the environment ``variable`` that moves it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise LoadError(f"cannot write to {folder} ({e.strerror}); set {variable} to a folder that can be written") from e


def _make_partial(folder: Path) -> Path:
    require_writable(folder)
    _sweep_partials(folder)
    return Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))


def _sweep_partials(folder: Path) -> None:
    """Remove what killed writers left behind."""
    for left in folder.glob(f"{PARTIAL}*"):
        try:
            stale = time.time() - left.stat().st_mtime > STALE_PARTIAL_S
        except OSError:  # its writer has just finished
            continue
        if stale:
            shutil.rmtree(left, ignore_errors=True)


def without_secrets(text: str, *secrets: str | None) -> str:
    """Blank out ``secrets`` and the user part of URLs, for messages that quote another program.

    >>> without_secrets("GET https://ada:pw@host/simple with hf_abc", "hf_abc")
    'GET https://***@host/simple with ***'
    """
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def size_text(num_bytes: int) -> str:
    """Return a size for people.

    >>> size_text(98_362_432), size_text(14_000_000_000)
    ('98 MB', '14.0 GB')
    """
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
