"""``python -m kvlab.train.bagel``: train bagel-tiny from nothing, or judge a checkpoint."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlab.errors import KvlabError
from kvlab.train.bagel import card, evaluate, export, run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvlab.train.bagel", description=__doc__)
    parser.add_argument("--out", type=Path, help="train, and write the checkpoint to this folder")
    parser.add_argument("--work", type=Path, default=Path("build/bagel"), help="where the state is kept; a killed run goes on")
    parser.add_argument("--autoencoder-steps", type=int, default=run.Plan.autoencoder_steps)
    parser.add_argument(
        "--decoder-steps", type=int, default=run.Plan.decoder_steps, help="of the autoencoder's decoder alone, after that"
    )
    parser.add_argument("--edits", type=int, default=run.Plan.edits, help="pairs of pictures that are drawn to learn from")
    parser.add_argument("--steps", type=int, default=run.Plan.steps, help="of the network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more than one pays only on an idle machine")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="judge this checkpoint")
    parser.add_argument("--requests", type=int, default=evaluate.NUM_OF_A_KIND, help="how many of each kind are judged")
    parser.add_argument("--json", action="store_true", help="print the judged shares as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if (asked.out is None) == (asked.evaluate is None):
        parser.error("say either --out FOLDER to train or --evaluate FOLDER to judge")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    torch.set_num_threads(asked.threads)
    try:
        found = _train(asked) if asked.out else evaluate.evaluate(asked.evaluate, num=asked.requests)
    except KvlabError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if asked.json else card.table(found))
    return 0


def _train(asked: argparse.Namespace) -> dict[str, Any]:
    plan = run.Plan(asked.work, asked.autoencoder_steps, asked.decoder_steps, asked.edits, asked.steps, asked.seed)
    autoencoder = run.train_autoencoder(plan)
    net = run.train_network(plan, autoencoder)
    export.write(asked.out, net, autoencoder)
    found = evaluate.evaluate(asked.out, num=asked.requests)
    card.write(asked.out, plan, found)
    return found


if __name__ == "__main__":
    sys.exit(main())
