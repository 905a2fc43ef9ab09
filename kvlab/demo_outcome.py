"""What a run of the demo has shown: each request beside its cold twin, the verdicts, and both as JSON and as printed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from kvlab import __version__
from kvlab.lab.results import TtftRow
from kvlab.lab.studies import first_difference, same_bits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvlab.engine.request import GenerationResult

MAX_ASKED_CHARACTERS = 100
ENOUGH_OF_TURN_ONE = 0.8  # turn two is expected to find this share of turn one's prompt and reply cached


@dataclass(frozen=True)
class Pair:
    """One request with the cache on, and the same with the cache off. ``asked`` = the question in words."""

    asked: str
    on: GenerationResult
    off: GenerationResult
    decode: Callable[[Sequence[int]], str]

    @property
    def difference(self) -> dict[str, Any] | None:
        """The first token at which the answers part, as each has it; None when they are equal."""
        index = first_difference(self.on.ids, self.off.ids)
        if index is None:
            return None
        return {"index": index, "cache_on": self._token(self.on, index), "cache_off": self._token(self.off, index)}

    def _token(self, result: GenerationResult, index: int) -> dict[str, Any] | None:
        ids = result.ids[index : index + 1]
        return {"id": ids[0], "text": self.decode(ids)} if ids else None

    @property
    def same_bits(self) -> bool | None:
        """Whether two cold runs agree in every bit; None for a hit, whose prefill was computed in other pieces."""
        return None if self.on.cached_tokens else same_bits(self.on, self.off)

    @property
    def compared(self) -> str:
        """The answers in one phrase."""
        parting = self.difference
        if parting is not None:
            return f"parts at token {parting['index']}: {_said(parting['cache_on'])} -> {_said(parting['cache_off'])}"
        return "equal, bit for bit" if self.same_bits else "equal"


def _said(token: dict[str, Any] | None) -> str:
    return "the end" if token is None else f"{token['id']} {token['text']!r}"


@dataclass(frozen=True)
class Verdict:
    """One thing the run has shown, in one sentence; ``ok`` says whether it is as it should be."""

    name: str
    ok: bool
    says: str


@dataclass(frozen=True)
class Outcome:
    """Everything that was measured. ``most_listed`` = (listed, held) pages while ``num_side_by_side`` questions ran at once."""

    model: dict[str, Any]
    num_pages: int
    page_size: int
    pairs: tuple[Pair, ...]
    num_side_by_side: int
    most_listed: tuple[int, int]
    ttft: tuple[TtftRow, ...]

    @property
    def model_line(self) -> str:
        """Model and machine in one line."""
        said = self.model
        threads = "1 thread" if said["threads"] == 1 else f"{said['threads']} threads"
        return f"{said['identity']}, {said['dtype']} on {said['device']}, {threads}, kvlab {__version__}"

    def pair(self, name: str) -> Pair:
        """The request of that name."""
        return next(pair for pair in self.pairs if pair.on.name == name)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Everything the run has shown, in the order of importance."""
    return [_second_turn(outcome), _answers(outcome), _cold(outcome), _stranger(outcome), _side_by_side(outcome)]


def _second_turn(outcome: Outcome) -> Verdict:
    first, second = outcome.pair("turn 1").on, outcome.pair("turn 2").on
    known = first.prompt_tokens + len(first.ids)
    share = second.cached_tokens / known
    return Verdict(
        "second_turn",
        share >= ENOUGH_OF_TURN_ONE,
        f"Turn 2 found {second.cached_tokens} tokens cached: {share:.0%} of the {known} of turn 1's prompt and reply.",
    )


def _answers(outcome: Outcome) -> Verdict:
    parted = [f"{pair.on.name} {pair.compared}" for pair in outcome.pairs if pair.difference is not None]
    equal = len(outcome.pairs) - len(parted)
    says = f"{equal} of {len(outcome.pairs)} answers are the same tokens with the cache on and off"
    return Verdict("answers_equal", not parted, ": ".join([says, *([", ".join(parted)] if parted else [])]) + ".")


def _cold(outcome: Outcome) -> Verdict:
    cold = [pair for pair in outcome.pairs if pair.same_bits is not None]
    equal = sum(pair.same_bits is True for pair in cold)
    says = f"{equal} of {len(cold)} cold runs agree bit for bit with the cache on and off: tokens and log-probabilities."
    return Verdict("cold_runs_bit_equal", equal == len(cold) > 0, says)


def _stranger(outcome: Outcome) -> Verdict:
    alone = outcome.pair("stranger").on
    cause, evidence = (alone.misses[0].cause, alone.misses[0].evidence) if alone.misses else ("none", "")
    says = f"The stranger, with a system prompt of its own, found {alone.cached_tokens} tokens cached: {cause} ({evidence})."
    return Verdict("stranger_shares_nothing", alone.cached_tokens == 0, says)


def _side_by_side(outcome: Outcome) -> Verdict:
    listed, held = outcome.most_listed
    says = f"{outcome.num_side_by_side} questions side by side listed {listed} pages and held {held}."
    return Verdict("pages_are_shared", held < listed, says)


# -- as JSON -----------------------------------------------------------------------------------------------------------


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome in lists, numbers and strings."""
    listed, held = outcome.most_listed
    return {
        "kvlab": __version__,
        "model": outcome.model,
        "num_pages": outcome.num_pages,
        "page_size": outcome.page_size,
        "requests": [_request(pair, result) for pair in outcome.pairs for result in (pair.on, pair.off)],
        "side_by_side": {"requests": outcome.num_side_by_side, "listed_pages": listed, "held_pages": held},
        "ttft": [asdict(row) for row in outcome.ttft],
        "verdicts": {verdict.name: {"ok": verdict.ok, "says": verdict.says} for verdict in verdicts(outcome)},
    }


def _request(pair: Pair, result: GenerationResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "cache": "on" if result is pair.on else "off",
        "asked": pair.asked,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "pages_matched": result.pages_matched,
        "ttft_ms": _rounded(result.ttft_ms),
        "tokens_per_s": _rounded(result.tokens_per_s),
        "generated_tokens": len(result.ids),
        "finish_reason": result.finish_reason,
        "text": result.text,
        "misses": result.misses.to_dicts(),
        "first_difference": pair.difference,
        "same_bits": pair.same_bits,
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


# -- as tables ---------------------------------------------------------------------------------------------------------


def show(outcome: Outcome, console: Console) -> None:
    """Print the requests, why tokens were computed, the answers, and the verdicts."""
    for table in (_request_table(outcome), _miss_table(outcome), _answer_table(outcome, console.encoding)):
        console.print(table)
        console.print()
    console.print(_verdict_grid(outcome, console.encoding))
    console.print()


def _titled(title: str, **options: Any) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", **options)


def _request_table(outcome: Outcome) -> Table:
    table = _titled(f"Requests, in pages of {outcome.page_size} tokens")
    table.add_column("request", no_wrap=True)
    table.add_column("cache")
    for name in ("prompt tokens", "cached tokens", "pages matched", "first token, ms", "tokens/s"):
        table.add_column(name, justify="right", min_width=7)
    for which in ("on", "off"):
        for pair in outcome.pairs:
            table.add_row(pair.on.name, which, *_numbers(getattr(pair, which)))
        table.add_section()
    return table


def _numbers(result: GenerationResult) -> Iterator[str]:
    yield from map(str, (result.prompt_tokens, result.cached_tokens, result.pages_matched))
    yield "-" if result.ttft_ms is None else f"{result.ttft_ms:.0f}"
    yield "-" if result.tokens_per_s is None else f"{result.tokens_per_s:.1f}"


def _miss_table(outcome: Outcome) -> Table:
    table = _titled("Why prompt tokens were computed")
    for column in ("request", "tokens", "cause", "evidence"):
        table.add_column(column, no_wrap=column != "evidence")
    for pair in outcome.pairs:
        for miss in pair.on.misses:
            table.add_row(pair.on.name, f"{miss.start} to {miss.stop - 1}", miss.cause, miss.evidence)
    table.add_section()
    off = Counter((miss.cause, miss.evidence) for pair in outcome.pairs for miss in pair.off.misses)
    for (cause, evidence), number in off.items():  # all of them for one reason
        table.add_row(f"{number} with it off", "all", cause, evidence)
    return table


def _answer_table(outcome: Outcome, encoding: str) -> Table:
    from rich.text import Text

    table = _titled("Answers with the cache on", show_lines=True)
    table.add_column("request", no_wrap=True)
    table.add_column("question and answer", ratio=1)
    table.add_column("with it off", max_width=24)
    for pair in outcome.pairs:
        asked = shorten(pair.asked, MAX_ASKED_CHARACTERS, placeholder=" ...")
        said = Text.assemble((f"{asked}\n", "dim"), _printable(pair.on.text.strip(), encoding))
        table.add_row(pair.on.name, said, Text(_printable(pair.compared, encoding)))
    return table


def _verdict_grid(outcome: Outcome, encoding: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for verdict in verdicts(outcome):
        mark = Text("yes", "green") if verdict.ok else Text("no", "red")
        grid.add_row(mark, Text(_printable(verdict.says, encoding)))
    return grid


def _printable(text: str, encoding: str) -> str:
    """Replace what the terminal cannot show or would obey; a model may say anything."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return shown.encode(encoding, "replace").decode(encoding)
