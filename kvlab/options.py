"""Numbers and switches among options: what counts as one, whoever made it, and what is said of what does not.

numpy's numbers are numbers, and become Python's own, so that they print and are written like them. A bool is no number.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from typing import Any

from kvlab.errors import InputError


def is_whole(value: Any) -> bool:
    """True for a whole number.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for a finite number.

    >>> is_number(0.5), is_number(2), is_number(float("nan")), is_number("2"), is_number(10**400)
    (True, True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def plain(value: Any) -> Any:
    """Return Python's own int or float for a number, and anything else as it is."""
    if is_whole(value):
        return int(value)
    return float(value) if is_number(value) else value


def whole(name: str, value: Any, least: int, why: str = "") -> int:
    """Return ``value`` as an int.

    Raises:
        InputError: no whole number, or one below ``least``; ``why`` says where that bound comes from.

    >>> whole("num_pages", 1, 2, "the sink and one page to use")
    Traceback (most recent call last):
    kvlab.errors.InputError: num_pages is 1; it must be a whole number of at least 2 (the sink and one page to use)
    """
    if not is_whole(value) or value < least:
        tail = f" ({why})" if why else ""
        raise InputError(f"{name} is {value!r}; it must be a whole number of at least {least}{tail}")
    return int(value)


def require_text(name: str, value: Any) -> None:
    """Raise InputError for what is no str."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r}; it must be text (a str)")


def require_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """Check that ``value`` is True or False, or None where that says "as usual".

    Raises:
        InputError: it is anything else.
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        raise InputError(f"{name} is {value!r}; it must be {'True, False or None' if or_none else 'True or False'}")


def checks_invariants(check_invariants: bool | None) -> bool:
    """Return the switch as it was given, or where it is None as the environment's ``KVLAB_CHECK`` has it.

    Raises:
        InputError: no switch, or a variable that is neither 0 nor 1.
    """
    require_switch("check_invariants", check_invariants, or_none=True)
    if check_invariants is not None:
        return check_invariants
    said = os.environ.get("KVLAB_CHECK", "")
    if said not in ("", "0", "1"):
        raise InputError(f"KVLAB_CHECK is {said!r}; it must be 1 (check the pool after every change), 0, or not set")
    return said == "1"
