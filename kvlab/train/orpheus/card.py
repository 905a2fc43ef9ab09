"""The checkpoint's README: what it is, how it was made, and what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.train.orpheus import corpus, evaluate, run

ROWS = {
    "original": "espeak-ng's own recordings",
    "codec": "the same through the codec (encoded, decoded)",
    "synthesised": "spoken by the model from the text alone",
    "synthesised_against_other_texts": "the model's speech against the text of another phrase (what guessing gives)",
}

_TEXT = """\
# orpheus-tiny

An Orpheus in small: a Llama of {million:.1f} M parameters that writes the codes of a SNAC codec, seven a frame
of 2048 samples at 24 kHz. Both were trained from random weights, on a CPU, by `python -m kvlab.train.orpheus`.
It speaks a small English of {num_words} words in {num_voices} voices, and is meant for looking at shared pages.

* Voices: {voices}.
* Words: {words}.
* Phrases: three numbers ("seven two nine"), counts ("three red stars"), pairs ("the blue circle and the white square"),
  and places ("the red star is left of the blue square"); {num_texts:,} in all. Other words fall to letters, which the model
  has never heard.

## Measured

{phrases} phrases that were held out ({num_said} words), each in one voice. A listener, pocketsphinx with the grammar of all
phrases, writes down what it hears; the share is of wrong words. Sampling is Orpheus' own:
temperature 0.6, top-p 0.8, repetition penalty 1.3.

{table}
By voice: {by_voice}. Of all phrases {ended:.0%} ended by the end-of-speech token within {max_frames} frames.

Measure again with `python -m kvlab.train.orpheus --evaluate FOLDER --json` (the first two rows need espeak-ng;
pocketsphinx comes with the extra `train`).

## How it was made

* Speech: espeak-ng says the phrases. A tenth of all texts, chosen by a hash of the text, is held out from everything: their
  words are known, their order is not.
* Codec: {codec_phrases} phrases, pitch and speed a little different each time, {codec_steps} steps, then {decoder_steps} of
  the decoder alone; spectral distances, no adversary.
* Speech model: {speech_phrases} phrases, each voice at its own pitch and speed, {speech_steps} steps, a repetition penalty
  drawn for every line.{start}
* Again: `python -m kvlab.train.orpheus --out FOLDER --work STATE --codec-phrases {codec_phrases} --codec-steps
  {codec_steps} --decoder-steps {decoder_steps} --speech-phrases {speech_phrases} --speech-steps {speech_steps}{again}`

## Files

`config.json` (Llama; the key `orpheus` holds what differs from the release: where the custom tokens begin, the
size of the code book, the voices), `model.safetensors` (bfloat16), `generation_config.json`, `tokenizer.json`,
`tokenizer_config.json`; `snac/config.json` and `snac/model.safetensors` (float32, snac's own names).

## Licence

Apache-2.0, as kvlab. No weights and no recordings of others went into it.
"""

_STARTED = """
* It went on from an earlier checkpoint, given as `--start`: its codec is that one's, and its speech began with that one's."""


def table(found: Mapping[str, Any]) -> str:
    """Return the judged shares as a Markdown table."""
    rows = [f"| {label} | {_share(found[name])} |\n" for name, label in ROWS.items()]
    return "| what is heard | wrong words |\n|---|---|\n" + "".join(rows)


def _share(value: float | None) -> str:
    return "not measured: espeak-ng is missing" if value is None else f"{value:.1%}"


def write(folder: Path, plan: run.Plan, found: Mapping[str, Any], *, num_parameters: int) -> None:
    """Write the README of a checkpoint folder."""
    by_voice = ", ".join(f"{voice} {share:.1%}" for voice, share in found["synthesised_by_voice"].items())
    text = _TEXT.format(
        million=num_parameters / 1e6,
        num_words=len(corpus.words()),
        num_voices=len(corpus.VOICES),
        voices=", ".join(corpus.VOICES),
        words=", ".join(corpus.words()),
        num_texts=len(corpus.texts()),
        phrases=found["phrases"],
        num_said=found["words"],
        table=table(found),
        by_voice=by_voice,
        ended=found["ended_by_themselves"],
        max_frames=evaluate.MAX_FRAMES,
        codec_phrases=plan.codec_phrases,
        codec_steps=plan.codec_steps,
        decoder_steps=plan.decoder_steps,
        speech_phrases=plan.speech_phrases,
        speech_steps=plan.speech_steps,
        start=_STARTED if plan.start is not None else "",
        again=" --start EARLIER" if plan.start is not None else "",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
