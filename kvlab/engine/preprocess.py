"""Where prompts are tokenised and keyed: beside the engine, in a thread, or in a process. The keys are the same bytes."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from kvlab.engine.keyer import Prepared as Prepared
from kvlab.engine.keyer import PromptKeyer
from kvlab.errors import InputError, KvlabError
from kvlab.spec import PrefixStream, PromptProcessor

logger = logging.getLogger("kvlab.engine")

T = TypeVar("T")
MODES = ("inline", "thread", "process")


class PreprocessWorker:
    """Prepares prompts one after another.

    Args:
        processor: makes ids of a prompt; picklable for ``mode="process"``.
        streams: the model's declaration, {resource: {label: PrefixStream}}.
        page_sizes: slots per page of each declared resource, as the engine uses them.
        mode: "inline" (in the caller's own time), "thread", or "process" (spawned at first use).
        memo_bytes: memory for prefixes already hashed.
        profile: "kvlab", or "published" for the published system's boundaries.

    Raises:
        InputError: an unknown mode, a resource without a page size, or a processor that cannot travel to a process.
    """

    def __init__(
        self,
        processor: PromptProcessor,
        streams: Mapping[str, Mapping[str, PrefixStream]],
        page_sizes: Mapping[str, int],
        *,
        mode: str = "inline",
        memo_bytes: int = 64 << 20,
        profile: str = "kvlab",
    ) -> None:
        if mode not in MODES:
            raise InputError(f"preprocess mode is {mode!r}; it must be one of {', '.join(MODES)}")
        keyer = PromptKeyer(processor, streams, page_sizes, memo_bytes=memo_bytes, profile=profile)
        self.mode = mode
        self._keyer = _RemoteKeyer(keyer) if mode == "process" else keyer
        self._lane = None if mode == "inline" else ThreadPoolExecutor(1, thread_name_prefix="kvlab-preprocess")
        self._is_closed = False

    def prepare(self, prompt: Any, fields: Mapping[str, Any] | None = None) -> Prepared:
        """Return the prompt's record and keys; waits for the worker.

        Raises:
            InputError: the prompt cannot be tokenised.
            KvlabError: the worker is closed, or its process ended.
        """
        return self.submit(prompt, fields).result()

    def submit(self, prompt: Any, fields: Mapping[str, Any] | None = None) -> Future[Prepared]:
        """Queue a prompt; inline, the future is already complete."""
        return self._run(self._keyer.prepare, prompt, dict(fields or {}))

    def remember(self, resource: str, ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Keep a finished request's keys, so that a follow-up hashes only what it adds."""
        self._run(self._keyer.remember, resource, ids, keys).add_done_callback(_warn_if_failed)

    def num_memo_bytes(self) -> int:
        """Memory held for prefixes already hashed."""
        return self._run(self._keyer.num_memo_bytes).result()

    def close(self) -> None:
        """Finish what runs, drop what waits, and end the thread or process."""
        self._is_closed = True
        if self._lane is not None:
            self._lane.shutdown(wait=True, cancel_futures=True)
        if isinstance(self._keyer, _RemoteKeyer):
            self._keyer.stop()

    def __enter__(self) -> PreprocessWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PreprocessWorker({self.mode}{', closed' if self._is_closed else ''})"

    def _run(self, work: Callable[..., T], *args: Any) -> Future[T]:
        if self._is_closed:
            raise KvlabError("the preprocess worker is closed; make a new engine")
        if self._lane is not None:
            return self._lane.submit(work, *args)
        done: Future[T] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:  # delivered where the result is asked for, as from a thread
            done.set_exception(error)
        return done


def _warn_if_failed(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("the keys of a finished request could not be kept, so its follow-up is hashed again: %s", error)


class _RemoteKeyer:
    """A PromptKeyer in a process of its own, spawned at first use and again after it ended. One caller at a time."""

    def __init__(self, keyer: PromptKeyer) -> None:
        self._pickled = _dumps(keyer, "the prompt processor")
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def prepare(self, prompt: Any, fields: Mapping[str, Any]) -> Prepared:
        return self._ask("prepare", prompt, fields)

    def remember(self, resource: str, ids: Sequence[int], keys: Sequence[bytes]) -> None:
        self._ask("remember", resource, ids, keys)

    def num_memo_bytes(self) -> int:
        return self._ask("num_memo_bytes")

    def stop(self) -> int | None:
        """End the process; returns its exit code."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process is None or pipe is None:
            return None
        pipe.close()
        process.join(timeout=5)
        if process.is_alive():
            process.terminate()
            process.join()
        return process.exitcode

    def _ask(self, verb: str, *args: Any) -> Any:
        question = _dumps((verb, args), "the prompt")
        pipe = self._pipe or self._start()
        try:
            pipe.send_bytes(question)
            is_answer, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            code = self.stop()
            raise KvlabError(
                f"the preprocess process ended (exit code {code}) before it answered; the next request starts a new one. "
                'In a script, start the engine under if __name__ == "__main__", or use preprocess mode "thread"'
            ) from None
        if not is_answer:
            raise value
        return value

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        pipe, far_end = context.Pipe()
        process = context.Process(target=_serve, args=(far_end, self._pickled), name="kvlab-preprocess", daemon=True)
        try:
            process.start()
        finally:
            far_end.close()  # its process holds the only copy now, so that its end is seen here
        self._process, self._pipe = process, pipe
        return pipe


def _serve(pipe: Connection, pickled_keyer: bytes) -> None:
    """Answer questions until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the engine, which ends this process by closing the pipe
    keyer = None
    while True:
        try:
            question = pipe.recv_bytes()
        except EOFError:
            return
        try:
            keyer = keyer or pickle.loads(pickled_keyer)
            verb, args = pickle.loads(question)
            answer = pickle.dumps((True, getattr(keyer, verb)(*args)))
        except Exception as error:
            answer = _pickled_error(error)
        pipe.send_bytes(answer)


def _pickled_error(error: Exception) -> bytes:
    """The error as itself where it survives the journey, else what it says."""
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
        return answer
    except Exception:
        return pickle.dumps((False, KvlabError(f"{type(error).__name__}: {error}")))


def _dumps(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InputError(f'{what} cannot travel to a process ({error}); use preprocess mode "thread"') from error
