"""Where the small inputs and the notebooks that travel with kvlab lie: inside an installed wheel, or in a checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlab.errors import InputError, LoadError

_PACKAGE = Path(__file__).resolve().parent


def _find(packaged: str, checked_out: str) -> Path:
    places = (_PACKAGE / packaged, _PACKAGE.parent / checked_out)
    for place in places:
        if place.is_dir():
            return place
    looked = " and ".join(str(place) for place in places)
    raise LoadError(f"kvlab's own {checked_out} are missing; looked for {looked}; install kvlab again")


def data_dir() -> Path:
    """Return the folder of shipped inputs.

    >>> (data_dir() / "README.md").is_file()
    True
    """
    return _find("_data", "data")


def notebooks_dir() -> Path:
    """Return the folder of built notebooks."""
    return _find("_notebooks", "notebooks")


def checkout_dir() -> Path | None:
    """Return the folder of the checkout that kvlab runs from, None for an installed wheel."""
    is_one = not (_PACKAGE / "_notebooks").is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file()
    return _PACKAGE.parent if is_one else None


def is_checkout() -> bool:
    """True when kvlab runs from a checkout, where notebooks have sources and can be built."""
    return checkout_dir() is not None


def prompt_names() -> list[str]:
    """Names of the shipped prompts.

    >>> prompt_names()
    ['chat', 'harbour']
    """
    return sorted(path.stem for path in (data_dir() / "prompts").glob("*.json"))


def prompt(name: str) -> dict[str, Any]:
    """Return a shipped prompt by name.

    >>> prompt("harbour")["questions"][0]
    'Who is the harbour master of Skarnvik?'

    Raises:
        InputError: there is no prompt of that name; the message lists those there are.
    """
    if name not in prompt_names():
        raise InputError(f"there is no shipped prompt {name!r}; there are: {', '.join(prompt_names())}")
    loaded: dict[str, Any] = json.loads((data_dir() / "prompts" / f"{name}.json").read_text(encoding="utf-8"))
    return loaded
