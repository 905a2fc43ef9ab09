"""What kvlab raises. Every message says what happened, the numbers, and what to do."""

from __future__ import annotations

import sys


class KvlabError(Exception):
    """Base of everything kvlab raises on purpose."""


class InputError(KvlabError, ValueError):
    """A request, an option or a value that cannot be served as it is."""


class LoadError(KvlabError, ValueError):
    """A model, a checkpoint or a declaration that cannot be loaded."""


class FetchError(KvlabError):
    """Weights that are neither here nor to be had."""


class MissingExtraError(KvlabError, ImportError):
    """An optional library is not installed; the message names the extra to install."""


class IntegrityError(KvlabError):
    """A broken invariant of the cache. Raised, never asserted, so that it holds under ``python -O``."""


class StallError(KvlabError):
    """Every request waits for pages and nothing in flight can free one."""


class DeadlineError(KvlabError, TimeoutError):
    """A request passed its own deadline and was ended."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the kvlab that runs, in the Python that runs it."""
    from kvlab.shipped import checkout_dir  # it raises what stands above

    folder = checkout_dir()
    what = f'"kvlab[{extra}]"' if folder is None else f'-e "{folder}[{extra}]"'
    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable
    return f"{python} -m pip install {what}"


def missing_extra(library: str, extra: str, why: str) -> MissingExtraError:
    """Return the error to raise when an optional library is absent.

    >>> str(missing_extra("plotly", "lab", "to draw figures")).partition("; run: ")[0]
    'plotly is needed to draw figures and is not installed'
    """
    return MissingExtraError(f"{library} is needed {why} and is not installed; run: {install_command(extra)}")
