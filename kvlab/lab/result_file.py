"""The file of a run's results: a first line that says which run it is, then one request a line. Another run goes on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from kvlab.errors import InputError, KvlabError

SCHEMA = 1


class ResultFile:
    """What a run wrote and writes. A line that was cut off as the last run was killed is taken away.

    Args:
        run: what makes the run what it is, plain values; names of nested ones are joined by dots in messages.

    Raises:
        InputError: the file cannot be opened, is no result file, is damaged, or is another run's; what differs is named.
        KvlabError: the disk is full.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._head = json.loads(json.dumps({"kvlab_results": SCHEMA, **run}, default=_name_of))
        try:
            is_new = self._read() == 0
            self._file: TextIO = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"results cannot be written to {path} ({error.strerror}); name a file in a folder that is there"
            ) from error
        if is_new:
            self._write(self._head)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one request's result; it is in the file when this returns.

        Raises:
            KvlabError: the disk is full.
        """
        self._write(row)

    def close(self) -> None:
        """Finish the file; everything in it was written as it came, and what could not be was told then."""
        with suppress(OSError):
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            self.close()
            raise KvlabError(
                f"a result cannot be written to {self.path} ({error.strerror}); make room and run again: it goes on from the "
                "results that are there"
            ) from error

    # -- what an earlier run left

    def _read(self) -> int:
        """Take in what is there; returns how many bytes of it stay."""
        if not self.path.is_file():
            return 0
        content = self.path.read_bytes()
        stays = content.rfind(b"\n") + 1
        if stays == 0 and not (json.dumps(self._head) + "\n").encode("utf-8").startswith(content):
            raise self._no_result_file(1, "its first line does not end")
        if stays > 0:
            self._check_head(content[:stays].splitlines()[0])
            self.rows = [self._row(number, line) for number, line in enumerate(content[:stays].splitlines()[1:], 2)]
        if stays < len(content):
            with open(self.path, "r+b") as file:
                file.truncate(stays)
        return stays

    def _check_head(self, line: bytes) -> None:
        found = self._parse(1, line)
        if "kvlab_results" not in found:
            raise self._no_result_file(1, "it does not say which run it belongs to")
        there, here = dict(_flat(found)), dict(_flat(self._head))
        differing = [name for name in here | there if here.get(name) != there.get(name)]
        if differing:
            name = differing[0]
            raise InputError(
                f"{self.path} holds the results of another run: there {name} is {there.get(name)!r}, here {here.get(name)!r}"
                f"{f', and {len(differing) - 1} more differ' if differing[1:] else ''}; give another file, or the same settings"
            )

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        row = self._parse(number, line)
        if missing := [name for name in ("id", "reason", "prompt_ids", "ids") if name not in row]:
            raise self._no_result_file(number, f"it lacks {', '.join(missing)}")
        return row

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._no_result_file(number, "it is no JSON") from error
        if not isinstance(found, dict):
            raise self._no_result_file(number, "it is no JSON object")
        return found

    def _no_result_file(self, number: int, why: str) -> InputError:
        return InputError(f"{self.path}, line {number}: not what kvlab run writes ({why}); give a file of its own")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _name_of(value: object) -> str:
    return str(getattr(value, "name", type(value).__name__))
