"""``python -m kvlab.train.orpheus``: train orpheus-tiny from nothing or further, or judge a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab.train import command
from kvlab.train.orpheus import card, evaluate, export, run


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser("orpheus", __doc__)
    numbers = {
        "codec-phrases": "recordings the codec learns from",
        "codec-steps": "of the codec",
        "decoder-steps": "of the codec's decoder alone, after that",
        "speech-phrases": "phrases the speech model learns from",
        "speech-steps": "of the speech model",
    }
    for name, what in numbers.items():
        usual = getattr(run.Plan, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=command.at_least(1), default=usual, help=what)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="keep this checkpoint's codec, train its speech model on")
    parser.add_argument(
        "--phrases", type=command.at_least(2), default=evaluate.NUM_PHRASES, help="how many held-out phrases are judged"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return command.run_command(_parser(), arguments, train=_train, evaluate=_judge, table=card.table)


def _judge(asked: argparse.Namespace) -> dict[str, Any]:
    return evaluate.evaluate(asked.evaluate, num_phrases=asked.phrases)


def _train(asked: argparse.Namespace) -> dict[str, Any]:
    plan = run.Plan(
        asked.work,
        asked.codec_phrases,
        asked.codec_steps,
        asked.decoder_steps,
        asked.speech_phrases,
        asked.speech_steps,
        asked.seed,
        asked.start,
    )
    codec_net = run.train_codec(plan)
    net = run.train_speech(plan, codec_net)
    export.write(asked.out, net, codec_net)
    found = evaluate.evaluate(asked.out, num_phrases=asked.phrases)
    card.write(asked.out, plan, found, num_parameters=net.num_parameters())
    return found


if __name__ == "__main__":
    sys.exit(main())
