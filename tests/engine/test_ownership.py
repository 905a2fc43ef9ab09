"""An engine belongs to one thread at a time."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvlab.engine.ownership import Ownership, for_one_thread
from kvlab.errors import InputError


class Box:
    """Something with one method that lets a test in, and one that is short."""

    def __init__(self) -> None:
        self.ownership = Ownership()

    @for_one_thread
    def generate(self, while_inside: Callable[[], Any], *, fails: bool = False) -> Any:
        """Call back."""
        found = while_inside()
        if fails:
            raise ZeroDivisionError
        return found

    @for_one_thread
    def step(self) -> int:
        return 1


def in_thread(function: Callable[[], Any], name: str = "second") -> Any:
    """Return what ``function`` returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(10)
    return found[0]


def test_a_second_thread_is_refused_and_both_are_named() -> None:
    box = Box()
    error = box.generate(lambda: in_thread(box.step))
    assert isinstance(error, InputError)
    assert "step was called in thread 'second' while thread 'MainThread' is inside generate" in str(error)
    assert "one thread" in str(error)


def test_the_thread_that_is_inside_goes_on_and_stays_named_by_what_it_began() -> None:
    box = Box()
    assert box.generate(box.step) == 1
    assert "inside generate" in str(box.generate(lambda: (box.step(), in_thread(box.step))[1]))


def test_threads_may_take_turns() -> None:
    box = Box()
    assert [in_thread(box.step, f"turn {i}") for i in range(3)] == [1, 1, 1]
    assert box.step() == 1


def test_a_refusal_changes_nothing_for_either_thread() -> None:
    box = Box()
    assert isinstance(box.generate(lambda: [in_thread(box.step) for _ in range(3)][2]), InputError)
    assert repr(box.ownership) == "Ownership(nobody is inside)"
    assert in_thread(box.step) == 1


def test_an_error_inside_lets_others_in_again() -> None:
    box = Box()
    with pytest.raises(ZeroDivisionError):
        box.generate(int, fails=True)
    assert in_thread(box.step) == 1


def test_a_guarded_method_keeps_its_name_signature_and_words() -> None:
    assert Box.generate.__name__ == "generate"
    assert Box.generate.__doc__ == "Call back."
    assert list(inspect.signature(Box.generate).parameters) == ["self", "while_inside", "fails"]


def test_of_many_threads_that_come_at_once_one_is_inside_at_any_time() -> None:
    box, inside, most, refused = Box(), [0], [0], [0]

    def look() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    def work() -> None:
        for _ in range(200):
            try:
                box.generate(look)
            except InputError:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1]
    assert box.step() == 1


def test_an_engine_refuses_a_second_thread_and_finishes_what_the_first_began(tracer) -> None:
    engine = tracer()
    refusals: list[Any] = []

    def intrude(chunk: Any) -> None:
        verbs = {"submit": lambda: engine.submit([1, 2]), "step": engine.step, "check": engine.check}
        refusals.extend((verb, in_thread(call)) for verb, call in verbs.items() if chunk.index == 0)

    result = engine.generate([1, 2, 3], max_tokens=3, on_token=intrude)
    assert list(result.ids) == engine.model.continuation([1, 2, 3], 3)
    assert [verb for verb, _ in refusals] == ["submit", "step", "check"]
    for verb, error in refusals:
        assert isinstance(error, InputError)
        assert f"{verb} was called in thread 'second'" in str(error)
    assert in_thread(lambda: engine.generate([1, 2, 3], max_tokens=3)).ids == result.ids, "threads may take turns"
