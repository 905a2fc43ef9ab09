"""What ``kvlab demo`` does: a real model on prompts that share a beginning, with the cache and without.

A model that speaks has a demo of its own, ``kvlab.demo_speech``, and one that draws ``kvlab.demo_picture``. Here every request
runs on two engines over one model, one of them with its cache off, so that each answer has a cold twin: equal token for token,
or the first token that differs is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvlab.errors import InputError
from kvlab.options import whole
from kvlab.shipped import prompt as shipped_prompt
from kvlab.spec import Prompt, PromptProcessor, chat

if TYPE_CHECKING:
    from rich.console import Console

    from kvlab.demo_outcome import Outcome
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult
    from kvlab.lab.results import TtftRow
    from kvlab.models.loading import Checkpoint
    from kvlab.models.text import TextModel
    from kvlab.recorder import Recorder

POOL_TOKENS = 4096  # slots of the pool when no number of pages is given
PAGE_SIZE = 16
MAX_TOKENS = 32
NUM_QUESTIONS = 4  # asked one by one and timed; all of them are then asked side by side
SIDE_BY_SIDE_TOKENS = 8
TIMED_PROMPT_TOKENS = 512
TIMED_ROUNDS = 2
DEFAULT_REPORT = "kvlab-demo.html"


def run(
    *,
    model: str = "smollm2-135m",
    num_pages: int | None = None,
    page_size: int | None = None,
    max_tokens: int | None = None,
    out: str | Path | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the demo of a model's kind, print what it found, and write the HTML report, or the two sounds.

    Args:
        model: name or path of a text model, of one that speaks, or of one that draws.
        num_pages: pages of the pool; 4096 slots when not given, 512 for pictures.
        page_size: tokens a page; 16 when not given, 4 for speech and pictures.
        max_tokens: most tokens of an answer; 32 when not given, 420 for speech; a picture has none.
        out: a folder, or where the report goes, or what the names of the two sounds begin with; ``kvlab-demo`` in the current
            folder when not given.
        as_json: print no tables: the caller prints what is returned.
        console: where lines and tables go; stdout, or stderr with ``as_json``.

    Returns:
        What was measured, ready for JSON.

    Raises:
        InputError: an illegal option, or a model that cannot be asked in words.
        LoadError: weights that are damaged or do not fit into memory.
        FetchError: weights that are neither here nor to be had.
    """
    from rich.console import Console

    begin = perf_counter()
    console = console or Console(stderr=as_json)
    path = _report_path(DEFAULT_REPORT if out is None else out)
    for name, value, least in (("num_pages", num_pages, 2), ("page_size", page_size, 1), ("max_tokens", max_tokens, 1)):
        if value is not None:
            whole(name, value, least)  # before the minutes that weights may take
    pool = {"num_pages": num_pages, "page_size": page_size, "max_tokens": max_tokens}
    if _draws(model, console):
        from kvlab import demo_picture

        return demo_picture.run(model, path, **pool, as_json=as_json, console=console)
    checkpoint, speaks = _open(model, console)
    if speaks:
        from kvlab import demo_speech

        return demo_speech.run(checkpoint, **pool, out=out, as_json=as_json, console=console)
    size = PAGE_SIZE if page_size is None else page_size
    pages = POOL_TOKENS // size + 1 if num_pages is None else num_pages
    loaded = _load(checkpoint, console)
    outcome, events = _play(loaded, pages, size, MAX_TOKENS if max_tokens is None else max_tokens, console)
    _write_report(path, outcome, events)
    return _finish(outcome, path, perf_counter() - begin, console, as_json)


def _finish(outcome: Outcome, path: Path, seconds: float, console: Console, as_json: bool) -> dict[str, Any]:
    from kvlab.demo_outcome import show, to_json

    if not as_json:
        show(outcome, console)
    console.print(f"Report: {path.resolve()} ({seconds:.0f} s in all)", soft_wrap=True, highlight=False)
    return to_json(outcome) | {"report": str(path.resolve()), "seconds": round(seconds, 1)}


def _report_path(out: str | Path) -> Path:
    """Check where the report goes before the minute it takes to make it."""
    path = Path(out) / DEFAULT_REPORT if Path(out).is_dir() else Path(out)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"nothing can be written to {path}: {path.parent} is no folder to write in; give another --out")
    return path


# -- running -----------------------------------------------------------------------------------------------------------


def _draws(model: str, console: Console) -> bool:
    """True where the name or path means a model that draws; fetches it if need be."""
    with console.status("starting torch"):
        from kvlab.models.folders import is_bagel
        from kvlab.models.loading import find_model
    return is_bagel(find_model(model)[1])


def _open(model: str, console: Console) -> tuple[Checkpoint, bool]:
    """Return the checkpoint, fetched if need be, and whether it speaks."""
    with console.status("starting torch"):
        from kvlab.models.loading import open_checkpoint
        from kvlab.models.orpheus.loading import is_orpheus
    checkpoint = open_checkpoint(model)  # says itself what it fetches or converts
    return checkpoint, is_orpheus(checkpoint.config)


def _load(checkpoint: Checkpoint, console: Console) -> TextModel:
    from kvlab.models.loading import load_text_model

    begin = perf_counter()
    with console.status(f"loading {checkpoint.name}"):
        loaded = load_text_model(checkpoint)
    _say(console, f"{loaded.identity} loaded in {perf_counter() - begin:.1f} s")
    return loaded


def _play(model: TextModel, num_pages: int, page_size: int, max_tokens: int, console: Console) -> tuple[Outcome, Recorder]:
    """Run every request on both engines; returns the outcome and the log of the engine with the cache on."""
    from kvlab.assemble import build_engine
    from kvlab.demo_outcome import Outcome, Pair
    from kvlab.lab import studies

    ask = _ask_for(model.processor)
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(build_engine(model, num_pages=num_pages, page_size=page_size, prefix_cache=cache))
            for cache in (True, False)
        )
        _warm_up(off)
        asked, hits = _requests(on, ask, max_tokens, console)
        _say(console, "The same with the cache off")
        cold = studies.replay(off, hits)
        num_side_by_side = _side_by_side(on, ask, console)
        outcome = Outcome(
            model=_model_facts(on),
            num_pages=num_pages,
            page_size=page_size,
            pairs=tuple(Pair(*both, model.processor.decode) for both in zip(asked, hits, cold, strict=True)),
            num_side_by_side=num_side_by_side,
            most_listed=studies.most_listed(on.events),
            ttft=tuple(_time_first_tokens(model, page_size, console)),
        )
        return outcome, on.events


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)


def _ask_for(processor: PromptProcessor) -> Callable[..., Prompt]:
    """Return how to put a question: as a chat, or as plain text where the checkpoint has no template for one."""
    for ask in (chat, plain):
        try:
            processor.process_prompt(ask("?", system="?"), {})
            return ask
        except InputError as error:
            refused = error
    raise InputError(f"the demo asks in words, which this model cannot read: {refused}")


def plain(question: str, *, system: str) -> str:
    """Return a prompt for a model that knows no chats.

    >>> plain("Who?", system="A handbook.")
    'A handbook.\\n\\nQuestion: Who?\\nAnswer:'
    """
    return f"{system}\n\nQuestion: {question}\nAnswer:"


def _warm_up(engine: Engine) -> None:
    """The first forward pass of a process pays for threads and buffers; no request that is timed should."""
    engine.generate([engine.model.vocab_size - 1] * 16, max_tokens=2, ignore_eos=True)


def _requests(
    engine: Engine, ask: Callable[..., Prompt], max_tokens: int, console: Console
) -> tuple[list[str], list[GenerationResult]]:
    """Send the demo's requests to the engine with the cache on; returns what was asked, and the results."""
    from kvlab.lab import studies

    harbour, talk = shipped_prompt("harbour"), shipped_prompt("chat")
    questions, stranger = harbour["questions"][:NUM_QUESTIONS], harbour["stranger"]
    options = {"max_tokens": max_tokens, "logprobs": 1}
    _say(console, f"{len(questions)} questions under one long system prompt")
    results = studies.shared_system_prompt(engine, harbour["system"], questions, ask=ask, **options)
    _say(console, "A chat of two turns, and a stranger")
    turns = talk["turns"] if ask is chat else [talk["turns"][0], *(plain(turn, system="") for turn in talk["turns"][1:])]
    results += studies.two_turn_chat(engine, talk["system"], turns, ask=ask, **options)
    alone = ask(stranger["question"], system=stranger["system"])
    results.append(engine.generate(alone, name="stranger", **options))
    return [*questions, *talk["turns"], stranger["question"]], results


def _side_by_side(engine: Engine, ask: Callable[..., Prompt], console: Console) -> int:
    """Ask all questions at once, so that running requests share pages with each other; returns how many."""
    from kvlab.lab import studies

    system, questions = (shipped_prompt("harbour")[part] for part in ("system", "questions"))
    _say(console, f"{len(questions)} questions side by side, on shared pages")
    studies.side_by_side(engine, system, questions, ask=ask, max_tokens=SIDE_BY_SIDE_TOKENS)
    return len(questions)


def _time_first_tokens(model: TextModel, page_size: int, console: Console) -> list[TtftRow]:
    from kvlab.assemble import build_engine
    from kvlab.lab import studies

    prompt_tokens = min(TIMED_PROMPT_TOKENS, model.max_seq_len // 2)
    num_pages = 4 * (prompt_tokens // page_size + 2)
    _say(console, "Time to the first token against cached tokens")
    with build_engine(model, num_pages=num_pages, page_size=page_size, record=False) as engine:
        return studies.ttft_against_cached(engine, prompt_tokens=prompt_tokens, rounds=TIMED_ROUNDS)


def _model_facts(engine: Engine) -> dict[str, Any]:
    import torch

    return {
        "name": engine.model.name,
        "identity": engine.model.identity,
        "dtype": engine.kv.layout.compute_dtype,
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
    }


# -- the report --------------------------------------------------------------------------------------------------------


def _write_report(path: Path, outcome: Outcome, events: Recorder) -> None:
    from kvlab.demo_outcome import verdicts
    from kvlab.lab.results import RequestRow
    from kvlab.report import write_report

    try:
        write_report(
            path,
            title="What happened when requests shared pages",
            rows=[RequestRow.of(pair.on) for pair in outcome.pairs],
            uncached=[replace(RequestRow.of(pair.off), name=f"{pair.off.name}, cache off") for pair in outcome.pairs],
            ttft_rows=outcome.ttft,
            events=events,
            model_line=outcome.model_line,
            notes=[verdict.says for verdict in verdicts(outcome)],
        )
    except OSError as error:
        raise InputError(f"the report cannot be written to {path} ({error.strerror}); use --out") from error
