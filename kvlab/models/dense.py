"""A GGUF file's folder of dense weights: made once, in a process of its own, and checked at each load.

Dequantising in the engine's process would leave its memory behind. The folder is a derived copy in kvlab's cache folder,
named after the SHA-256 of its source and written whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import LoadError
from kvlab.models.places import Say, cache_folder, sha256_file, size_text, whole_folder
from kvlab.progress import progress

FORMAT = 1  # of the dense folder; a new number converts again
RECORD = "kvlab_dense.json"


def dense_folder(source: Path, sha256: str, say: Say) -> Path:
    """Return the folder of dense weights of a GGUF file, converting it first where that has not been done.

    Args:
        source: The GGUF file.
        sha256: SHA-256 of the whole file, which names the folder.
        say: Told when a conversion starts.

    Raises:
        LoadError: the file is damaged, or of an architecture that kvlab does not run.
    """
    target = cache_folder() / "dense" / f"{source.stem[:48]}-{sha256[:16]}-v{FORMAT}"
    if target.is_dir():
        if is_whole(target, sha256):
            return target
        say(f"the dense copy {target} is not what was written there; converting again")
        shutil.rmtree(target)
    say(f"converting {source.name} ({size_text(source.stat().st_size)}) to dense float32 weights, once, into {target} ...")
    with whole_folder(target) as partial:
        _convert_in_child(source, partial)
        files = {p.name: sha256_file(p) for p in sorted(partial.iterdir())}
        record = {"format": FORMAT, "source_name": source.name, "source_sha256": sha256, "files": files}
        (partial / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return target


def is_whole(folder: Path, sha256: str) -> bool:
    """True when ``folder`` holds exactly the bytes that its record lists, made of the source with this SHA-256."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if (record["format"], record["source_sha256"]) != (FORMAT, sha256):
            return False
        return all(sha256_file(folder / name) == digest for name, digest in record["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert_in_child(source: Path, folder: Path) -> None:
    """Run the conversion of ``source`` in a fresh process under a progress bar.

    Raises:
        LoadError: with the child's own words.
    """
    root = str(Path(__file__).parents[2])  # the child must find this very package wherever it was imported from
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"}
    ask = [sys.executable, "-m", "kvlab.models.gguf", str(source), str(folder)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(ask, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=said, encoding="utf-8") as child,
    ):
        try:
            for _ in progress(_lines(child), f"converting {source.name}", unit="tensor"):
                pass
            child.wait()
        except BaseException:  # an interrupt must not leave the child writing
            child.kill()
            raise
        said.seek(0)
        words = said.read().decode("utf-8", "replace").strip().splitlines()
    if child.returncode != 0:
        why = words[-1] if words else "it said nothing"
        raise LoadError(why if child.returncode == 2 else f"converting {source} ended with exit {child.returncode}: {why}")


def _lines(child: subprocess.Popen[str]) -> Iterator[str]:
    if child.stdout is not None:
        yield from child.stdout
