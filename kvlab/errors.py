"""What kvlab raises. Every message says what happened, the numbers, and what to do."""

from __future__ import annotations


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


def missing_extra(library: str, extra: str, why: str) -> MissingExtraError:
    """Return the error to raise when an optional library is absent.

    >>> print(missing_extra("plotly", "lab", "to draw figures"))
    plotly is needed to draw figures and is not installed; run: pip install "kvlab[lab]"
    """
    return MissingExtraError(f'{library} is needed {why} and is not installed; run: pip install "kvlab[{extra}]"')
