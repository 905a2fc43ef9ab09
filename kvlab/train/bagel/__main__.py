"""``python -m kvlab.train.bagel``: train bagel-tiny from nothing, or judge a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvlab.train import command
from kvlab.train.bagel import card, evaluate, export, run


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser("bagel", __doc__)
    parser.add_argument("--autoencoder-steps", type=command.at_least(1), default=run.Plan.autoencoder_steps)
    parser.add_argument(
        "--decoder-steps",
        type=command.at_least(1),
        default=run.Plan.decoder_steps,
        help="of the autoencoder's decoder alone, after that",
    )
    parser.add_argument(
        "--edits", type=command.at_least(1), default=run.Plan.edits, help="pairs of pictures that are drawn to learn from"
    )
    parser.add_argument("--steps", type=command.at_least(1), default=run.Plan.steps, help="of the network")
    parser.add_argument(
        "--requests", type=command.at_least(1), default=evaluate.NUM_OF_A_KIND, help="how many of each kind are judged"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return command.run_command(_parser(), arguments, train=_train, evaluate=_judge, table=card.table)


def _judge(asked: argparse.Namespace) -> dict[str, Any]:
    return evaluate.evaluate(asked.evaluate, num=asked.requests)


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
