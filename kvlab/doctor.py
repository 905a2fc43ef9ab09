"""What `kvlab doctor` finds out: versions, device, memory, weights, backends, and what to install for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab import __version__, shipped
from kvlab.errors import install_command

#: What each extra is for, in the order they are shown.
EXTRAS = {
    "lab": "JupyterLab, notebooks and interactive figures",
    "bagel": "pictures: Bagel's autoencoder and image measures",
    "audio": "speech: the SNAC codec and sound files",
    "train": "training the small checkpoints again: the listener that judges speech",
    "cuda": "the FlashInfer attention backend on a CUDA device",
    "test": "the test suite",
    "dev": "lint, types and builds",
}


def examine() -> dict[str, Any]:
    """Return everything `kvlab doctor` knows, as plain values; fetches and installs nothing."""
    return {
        "kvlab": {"version": __version__, "path": str(Path(__file__).parent), "checkout": shipped.is_checkout()},
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "packages": packages(),
        "devices": devices(),
        "memory": memory(),
        "weights": weights(),
        "backends": backends(),
        "extras": extras(),
    }


def requirements() -> dict[str, list[str]]:
    """Return the distributions kvlab needs, by extra; "" holds those it always needs."""
    if shipped.is_checkout():  # what is written there may be newer than what was installed, or not be installed at all
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        lines = [(read_requirement(line)[0], extra) for extra, group in groups.items() for line in group]
    else:
        lines = [read_requirement(line) for line in importlib.metadata.requires("kvlab") or []]
    return {extra: [name for name, where in lines if where == extra and name != "kvlab"] for extra in ("", *EXTRAS)}


def read_requirement(line: str) -> tuple[str, str]:
    """Return the distribution and the extra of one line of package metadata.

    >>> read_requirement('plotly>=6.0; extra == "lab"'), read_requirement("torch<3,>=2.6")
    (('plotly', 'lab'), ('torch', ''))
    """
    head, _, marker = line.partition(";")
    name = re.match(r"[A-Za-z0-9._-]+", head.strip())
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    return (name.group() if name else "", extra.group(1) if extra else "")


def packages() -> dict[str, str | None]:
    """Return the version of every distribution kvlab can use, None for those that are absent."""
    names = [name for group in requirements().values() for name in group]
    return {name: installed_version(name) for name in dict.fromkeys(names)}


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution.

    >>> installed_version("no-such-distribution") is None
    True
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, dict[str, Any]]:
    """Return, by extra: what it is for, what is missing of it, and the command that installs it."""
    by_extra = requirements()
    found = {}
    for extra, purpose in EXTRAS.items():
        missing = [name for name in by_extra[extra] if installed_version(name) is None]
        found[extra] = {"for": purpose, "missing": missing, "install": install_command(extra) if missing else None}
    return found


def devices() -> list[dict[str, Any]]:
    """Return the devices torch can compute on, the one kvlab uses by default first."""
    import torch

    found: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            found.append({"device": f"cuda:{index}", "name": name, "free_bytes": free_bytes, "total_bytes": total_bytes})
    found.append({"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()})
    return found


def memory() -> dict[str, int]:
    """Return main memory in bytes: what can still be taken (a container's limit counted), and what the machine has."""
    import psutil

    from kvlab.models.memory import available_bytes

    return {"available_bytes": available_bytes(), "total_bytes": psutil.virtual_memory().total}


def weights() -> list[dict[str, Any]]:
    """Return the models kvlab knows by name and where their weights lie; ``path`` is None for those to be fetched."""
    from kvlab.models import registry

    return [{"name": name, "path": str(path) if path else None} for name, path in registry.known().items()]


def backends() -> dict[str, dict[str, Any]]:
    """Return, by the name ``kvlab.load(attention=)`` takes: whether a backend is usable, and why not."""
    import torch

    lacks = []
    if not torch.cuda.is_available():
        lacks.append("no CUDA device is visible to torch")
    if importlib.util.find_spec("flashinfer") is None:
        lacks.append(f"flashinfer is not installed; run: {install_command('cuda')}")
    return {
        "torch": {"usable": True, "why_not": None},
        "flashinfer": {"usable": not lacks, "why_not": "; ".join(lacks) or None},
    }


def render(findings: Mapping[str, Any]) -> str:
    """Return the findings as text for a person."""
    kvlab, python, mem = findings["kvlab"], findings["python"], findings["memory"]
    lines = [
        f"kvlab {kvlab['version']} at {kvlab['path']}",
        f"Python {python['version']} on {python['platform']}",
        f"memory: {_gib(mem['available_bytes'])} of {_gib(mem['total_bytes'])} available",
    ]
    return "\n".join([*lines, *map(_device_line, findings["devices"]), *_weights_lines(findings), *_install_lines(findings)])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _device_line(device: Mapping[str, Any]) -> str:
    room = (
        f"{device['threads']} threads"
        if "threads" in device
        else f"{_gib(device['free_bytes'])} of {_gib(device['total_bytes'])} free"
    )
    return f"device {device['device']}: {device['name']}, {room}"


def _weights_lines(findings: Mapping[str, Any]) -> list[str]:
    lines = ["", "models by name:"]
    for model in findings["weights"]:
        lines.append(f"  {model['name']}: {model['path'] or 'not here yet; run: kvlab fetch ' + model['name']}")
    lines += ["", "attention backends:"]
    for name, backend in findings["backends"].items():
        lines.append(f"  {name}: {'usable' if backend['usable'] else backend['why_not']}")
    return lines


def _install_lines(findings: Mapping[str, Any]) -> list[str]:
    lines = ["", "extras:"]
    for extra, state in findings["extras"].items():
        lacks = f"missing {', '.join(state['missing'])}; run: {state['install']}" if state["missing"] else "installed"
        lines.append(f"  {extra} ({state['for']}): {lacks}")
    versions = (f"{name} {version}" for name, version in findings["packages"].items() if version)
    return [*lines, "", "installed: " + ", ".join(versions)]
