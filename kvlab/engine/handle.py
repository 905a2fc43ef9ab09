"""What a client holds of a submitted request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlab.engine.request import GenerationResult, StreamChunk
from kvlab.engine.run import Run
from kvlab.errors import InputError, KvlabError
from kvlab.spec import RequestId


class RequestHandle:
    """A submitted request: iterate for its tokens, ``result()`` to wait for all of it, ``cancel()`` at any point.

    Args:
        step: advances the engine the request is in.
        cancel: ends the run.
    """

    def __init__(self, run: Run, *, step: Callable[[], int], cancel: Callable[[Run], None]) -> None:
        self._run, self._step, self._cancel = run, step, cancel

    @property
    def rid(self) -> RequestId:
        return self._run.rid

    @property
    def done(self) -> bool:
        """True once the request has a result."""
        return self._run.result is not None

    @property
    def outcome(self) -> GenerationResult | None:
        """The result as it is, failed ones included; None while the request is in flight."""
        return self._run.result

    def cancel(self) -> None:
        """End the request; what it generated so far is its result. Ended requests are left alone."""
        self._cancel(self._run)

    def result(self) -> GenerationResult:
        """Run the engine until this request has ended.

        Raises:
            InputError: the request was handed over: it ends in the engine that took it, or with ``cancel()``.
            Exception: what ended the request, if it did not end well.
        """
        while self._run.result is None:
            self._advance()
        result = self._run.result
        if result.error is not None:
            raise result.error
        return result

    def __iter__(self) -> Iterator[StreamChunk]:
        shown = 0
        while True:
            while shown < len(self._run.chunks):
                yield self._run.chunks[shown]
                shown += 1
            if self.done:
                return
            self._advance()

    def _advance(self) -> None:
        if self._run.is_handed_over:
            raise InputError(
                f"request {self.rid} was handed over and does not go on here: wait for it where it was taken over, then "
                "cancel() it here"
            )
        self._step()

    def __repr__(self) -> str:
        return f"RequestHandle({self.rid}, {'done' if self.done else 'in flight'})"


def finished(handles: list[RequestHandle]) -> list[GenerationResult]:
    """The results of handles that are all done."""
    results = [handle.outcome for handle in handles]
    if any(result is None for result in results):
        raise KvlabError("a request is still in flight")
    return [result for result in results if result is not None]
