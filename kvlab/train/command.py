"""What the training commands have in common: ``--out`` trains, ``--evaluate`` judges, and what was judged is printed."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from kvlab.errors import KvlabError

Judged: TypeAlias = Mapping[str, Any]
Work: TypeAlias = Callable[[argparse.Namespace], Judged]


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least`` on, for ``add_argument(type=...)``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def make_parser(kind: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every training command; those of the plan are the caller's to add."""
    parser = argparse.ArgumentParser(
        prog=f"python -m kvlab.train.{kind}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="train, and write the checkpoint to this folder")
    parser.add_argument("--work", type=Path, default=Path("build") / kind, help="where the state is kept; a killed run goes on")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of everything drawn at random")
    parser.add_argument("--threads", type=at_least(1), default=1, help="more than one pays only on an idle machine")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="judge this checkpoint")
    parser.add_argument("--json", action="store_true", help="print the judged shares as JSON")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    train: Work,
    evaluate: Work,
    table: Callable[[Any], str],
) -> int:
    """Train or judge as asked and print what was judged; returns the exit status."""
    asked = parser.parse_args(arguments)
    if (asked.out is None) == (asked.evaluate is None):
        parser.error("say either --out FOLDER to train or --evaluate FOLDER to judge")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("kvlab").setLevel(logging.WARNING)  # a line a request is too much beside a judge's tens
    logging.getLogger("kvlab.train").setLevel(logging.INFO)
    torch.set_num_threads(asked.threads)
    try:
        found = train(asked) if asked.out else evaluate(asked)
    except KvlabError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if asked.json else table(found))
    return 0
