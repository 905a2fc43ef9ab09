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
    parser.add_argument("--codec-phrases", type=int, default=run.Plan.codec_phrases)
    parser.add_argument("--codec-steps", type=int, default=run.Plan.codec_steps)
    parser.add_argument(
        "--decoder-steps", type=int, default=run.Plan.decoder_steps, help="of the codec's decoder alone, after that"
    )
    parser.add_argument("--speech-phrases", type=int, default=run.Plan.speech_phrases)
    parser.add_argument("--speech-steps", type=int, default=run.Plan.speech_steps)
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="keep this checkpoint's codec, train its speech model on")
    parser.add_argument("--phrases", type=int, default=evaluate.NUM_PHRASES, help="how many held-out phrases are judged")
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
