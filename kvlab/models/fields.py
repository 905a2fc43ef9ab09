"""Fields of a checkpoint's config, each read as its kind: what is not of it is refused by name and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.errors import LoadError
from kvlab.options import is_number, is_whole


def count_field(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a whole number above 0.

    Raises:
        LoadError: it is something else, or missing without a default.

    >>> count_field({"num_attention_heads": 0}, "num_attention_heads")
    Traceback (most recent call last):
    kvlab.errors.LoadError: config field num_attention_heads is 0; a positive whole number is needed
    """
    value = _given(config, name, default)
    if not is_whole(value) or value < 1:
        raise LoadError(f"config field {name} is {value!r}; a positive whole number is needed")
    return int(value)


def number_field(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a number above 0, as it was written: an int stays one.

    Raises:
        LoadError: it is something else, or missing without a default.
    """
    value = _given(config, name, default)
    if not is_number(value) or value <= 0:
        raise LoadError(f"config field {name} is {value!r}; a number above 0 is needed")
    number: float = value
    return number


def switch_field(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return true or false.

    Raises:
        LoadError: it is something else.
    """
    value = _given(config, name, default)
    if not isinstance(value, bool):
        raise LoadError(f"config field {name} is {value!r}; true or false is needed")
    return value


def mapping_field(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object of fields, empty where there is none.

    Raises:
        LoadError: it is something else.
    """
    value = config.get(name)
    if not isinstance(value, Mapping | None):
        raise LoadError(f"config field {name} is {value!r}; an object of fields, or null, is needed")
    return dict(value or {})


def list_field(config: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list, empty where there is none.

    Raises:
        LoadError: it is something else.
    """
    value = config.get(name)
    if isinstance(value, str) or not isinstance(value, Sequence | None):
        raise LoadError(f"config field {name} is {value!r}; a list, or null, is needed")
    return list(value or ())


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None and default is None:
        raise LoadError(f"the config has no field {name}; the checkpoint folder is incomplete or of another kind")
    return default if value is None else value
