"""The checkpoint's README: what it is, how it was made, and what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.models.bagel.weights import load_bagel
from kvlab.train.bagel import questions, run, sampling, scenes

ROWS = {
    "one_shape": "pictures of one shape",
    "two_shapes": "pictures of two shapes",
    "three_shapes": "pictures of three shapes",
    "edits": "edits",
    "questions": "questions about pictures",
    "descriptions": '"describe the picture", word for word',
    "chats": "chats without pictures",
    "autoencoder": "true pictures through the autoencoder",
    "true_pictures": "true pictures (what the judge misses)",
}

_TEXT = """\
# bagel-tiny

A BAGEL in small: the release's architecture and file layout with {million:.1f} M parameters and an autoencoder of
{autoencoder_million:.1f} M. Both were trained from random weights, on a CPU, by `python -m kvlab.train.bagel`. It draws,
edits and answers questions about scenes of one to three coloured shapes at 64 x 64 pixels, and is meant for looking at
shared pages, not at pictures.

* Colours: {colours}; backgrounds: {backgrounds}; shapes: {shapes}.
* Captions: "a red circle on a white background", "a red circle left of a blue square on a white background" (also right
  of, above, below), "a red circle and a blue square above a pink cross on a gray background".
* Edits: "make the circle green", "make the red circle a square", "make the background black".
* Questions, of a picture: "how many circles?", "how many shapes?", "what colour is the circle?", "what shape is red?",
  "what colour is the background?", "is there a red circle?", "what is left of the square?", "{describe}".
* Chats: "there is a red circle on a white background. what colour is the circle?", then more of these questions.
* Thinking: with BAGEL's own system text it plans a picture in words before it draws.

Other words fall to pieces that it has hardly met. Pictures given are resized to a longest side of 64 pixels; it has seen
squares only.

## Measured

On scenes that no training saw in any drawing or wording (one combination in {one_in}, chosen by a hash), {requests}
requests of a kind. A judge takes the nearest palette colour of every pixel and the best overlap with the shapes, place by
place; a picture is right when its background and every thing at every place are, and nothing else is there.
{num_timesteps} timesteps with shift {shift:g}; text scale 4, and image scale 2 for edits.

{table}
{details}
Measure again with `python -m kvlab.train.bagel --evaluate FOLDER --json`.

## How it was made

* Autoencoder: {autoencoder_steps} steps, then {decoder_steps} of the decoder alone after its latents were brought to one
  scale; it never sees a held-out scene.
* Network: {edits} pairs of pictures, before and after an edit, and {steps} steps of {draw} pictures from captions, {edit}
  edits, {ask} questions, {chat} chats and {think} plan, and a probe that asks the vision tower which shape each patch is of;
  the weights kept are a running average.
* Again: `python -m kvlab.train.bagel --out FOLDER --work STATE --autoencoder-steps {autoencoder_steps} --decoder-steps
  {decoder_steps} --edits {edits} --steps {steps}`

## Files

`ema.safetensors` (bfloat16), `ae.safetensors` (float32), `llm_config.json`, `vit_config.json`, `config.json` (the key
`bagel` holds what the release keeps in its code: ids, sizes of pictures, the autoencoder's norm groups), `tokenizer.json`,
`tokenizer_config.json`, `vocab.json`, `merges.txt`.

## Licence

Apache-2.0, as kvlab. No weights and no pictures of others went into it.
"""


def table(found: Mapping[str, Any]) -> str:
    """Return the judged shares as a Markdown table."""
    rows = [f"| {label} | {_first(found[name]):.1%} |\n" for name, label in ROWS.items()]
    return "| what is asked | right |\n|---|---|\n" + "".join(rows)


def _first(shares: Mapping[str, float]) -> float:
    return next(iter(shares.values()))


def _details(found: Mapping[str, Any]) -> str:
    """Return the shares by part and by kind, a line each."""
    named = {
        "One shape": "one_shape",
        "Two shapes": "two_shapes",
        "Three shapes": "three_shapes",
        "Edits": "edits",
        "Questions": "questions",
        "Chats": "chats",
    }
    lines = []
    for label, name in named.items():
        parts = [f"{part.replace('_', ' ')} {share:.0%}" for part, share in found[name].items() if part != "right"]
        lines.append(f"* {label}: {', '.join(parts)}.\n")
    noise_db = found["autoencoder"]["signal_to_noise_db"]
    return "".join(lines) + f"* The autoencoder keeps pictures at {noise_db:.1f} dB.\n"


def write(folder: Path, plan: run.Plan, found: Mapping[str, Any]) -> None:
    """Write the README of a checkpoint folder."""
    from kvlab.train.bagel.lessons import COUNTS

    net, autoencoder = load_bagel(folder)
    text = _TEXT.format(
        million=sum(p.numel() for p in net.parameters()) / 1e6,
        autoencoder_million=sum(p.numel() for p in autoencoder.parameters()) / 1e6,
        colours=", ".join(scenes.COLOURS),
        backgrounds=", ".join(scenes.BACKGROUNDS),
        shapes=", ".join(scenes.SHAPES),
        describe=questions.DESCRIBE,
        one_in=scenes.HELD_OUT_ONE_IN,
        requests=found["requests_of_a_kind"],
        num_timesteps=sampling.NUM_TIMESTEPS,
        shift=sampling.SHIFT,
        table=table(found),
        details=_details(found),
        autoencoder_steps=plan.autoencoder_steps,
        decoder_steps=plan.decoder_steps,
        edits=plan.edits,
        steps=plan.steps,
        **COUNTS,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
