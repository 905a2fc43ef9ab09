"""One thread at a time: an engine keeps no locks for its requests, so a second thread inside would break its books.

Threads may take turns. Where several have prompts at once, give each an engine of its own over one model, or let one thread
take the prompts of the others from a queue.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from kvlab.errors import InputError

Method = TypeVar("Method", bound=Callable[..., Any])  # its own type in and out, so that overloads stay what they are


class Ownership:
    """Who is inside an engine.

    >>> ownership = Ownership()
    >>> with ownership.inside("generate"), ownership.inside("step"):  # the thread that is inside may go on
    ...     print(ownership)
    Ownership(MainThread is inside generate)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth, self._thread, self._verb = 0, "", ""

    def __repr__(self) -> str:
        return f"Ownership({f'{self._thread} is inside {self._verb}' if self._depth else 'nobody is inside'})"

    @contextmanager
    def inside(self, verb: str) -> Iterator[None]:
        """Be inside the engine, in its method ``verb``.

        Raises:
            InputError: another thread is; the message names both and what each does.
        """
        here = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"{verb} was called in thread {here!r} while thread {self._thread!r} is inside {self._verb} of the same "
                "engine; an engine belongs to one thread: give each thread its own, or hand prompts to one of them through a "
                "queue"
            )
        try:
            if not self._depth:
                self._thread, self._verb = here, verb
            self._depth += 1
            yield
        finally:
            self._depth -= 1
            self._lock.release()


def for_one_thread(method: Method) -> Method:
    """Make a method refuse a thread that comes while another is inside; its object has an ``ownership``."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.ownership.inside(method.__name__):
            return method(self, *args, **kwargs)

    return cast(Method, guarded)
