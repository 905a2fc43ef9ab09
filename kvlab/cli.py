"""The ``kvlab`` command: thin, over functions that a notebook can call as well.

Exit codes: 0 done, 1 kvlab says no (one line on stderr), 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab import __version__
from kvlab.errors import InputError, KvlabError

#: What `kvlab bench` can measure: name -> "module:function", called without arguments, gives {"rows": ..., "machine": ...}.
BENCHES = {
    "index": "kvlab.bench.index:run",
    "engine": "kvlab.bench.engine:run",
    "orpheus": "kvlab.bench.orpheus:run",
    "bagel": "kvlab.bench.bagel:run",
    "pressure": "kvlab.bench.pressure:run",
}

#: What `kvlab study` can run: name -> "module:function", called with what was given, returns a kvlab.study.Outcome.
STUDIES = {
    "guided-sweep": "kvlab.study:guided_sweep",
    "pixel-noise": "kvlab.study:pixel_noise",
    "wrong-walk": "kvlab.study:wrong_walk",
}
#: Workloads that `kvlab run` draws.
RUN_WORKLOADS = ("shared-prefix", "chats", "edit-chains", "voices", "churn")

plain = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(help="What happens when requests share the KV pages of a common prefix?", **plain)  # type: ignore[arg-type]
notebooks_app = typer.Typer(
    help="Copy the notebooks that come with kvlab, or build and check them in a checkout.", rich_markup_mode=None
)
app.add_typer(notebooks_app, name="notebooks")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        app(args=args, prog_name="kvlab")
    except KvlabError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"kvlab: what it has to say cannot be written ({error.strerror}); make room", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _drop_output() -> None:
    """Let what is still in the buffer of stdout go nowhere, or Python fails once more on its way out."""
    if sys.__stdout__ is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvlab {__version__}")
        raise typer.Exit()


@app.callback()
def _kvlab(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Name or path of the model. [default: smollm2-135m]")] = None,
    num_pages: Annotated[int | None, typer.Option("--pages", help="Pages in the pool, the sink included.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate for each request.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the HTML report, or the two sounds.")] = None,
    as_json: Json = False,
) -> None:
    """Run a real model on shared prefixes, with the cache and without; print a table, write a report or two sounds."""
    from rich.console import Console

    given = {"model": model, "num_pages": num_pages, "page_size": page_size, "max_tokens": max_tokens, "out": out}
    options = {name: value for name, value in given.items() if value is not None}  # the rest is the demo's to choose
    run = _resolve("kvlab.demo:run")
    result = run(as_json=as_json, console=Console(stderr=as_json), **options)
    if as_json:
        _print_json(result)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Name of a model, for example smollm2-135m.")]) -> None:
    """Get the weights of a model ahead of time and say where they lie."""
    typer.echo(_resolve("kvlab.models.registry:fetch")(name))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"What to measure: {' | '.join(BENCHES)}.")],
    as_json: Json = False,
) -> None:
    """Measure kvlab against a reference in one run, as ratios."""
    if name not in BENCHES:
        raise typer.BadParameter(f"there is no bench {name!r}; there are: {', '.join(BENCHES)}", param_hint="NAME")
    result = _resolve(BENCHES[name])()
    if as_json:
        _print_json(result)
    else:
        _print_rows(result)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help=f"Which experiment: {' | '.join(STUDIES)}.")],
    model: Annotated[str, typer.Option(help="Name or path of a model that draws.")] = "bagel-tiny",
    prompt: Annotated[str | None, typer.Option(help="What is drawn; with wrong-walk, the edit's text.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of a sweep. [default: 8]")] = None,
    seed: Annotated[int, typer.Option(help="Of the picture, or the first of a sweep.")] = 0,
    as_json: Json = False,
) -> None:
    """Run an experiment on shared prefixes and say what it found."""
    if name not in STUDIES:
        raise typer.BadParameter(f"there is no study {name!r}; there are: {', '.join(STUDIES)}", param_hint="NAME")
    given = {"prompt": prompt, "num_seeds": seeds}
    options = {option: value for option, value in given.items() if value is not None}
    if seeds is not None and name != "guided-sweep":
        raise typer.BadParameter(f"{name} is no sweep of seeds; give --seed", param_hint="--seeds")
    outcome = _resolve(STUDIES[name])(model, seed=seed, **options)
    if as_json:
        _print_json(outcome.to_json())
    else:
        _print_outcome(outcome)


@app.command()
def size(
    model: Annotated[str, typer.Argument(help="Name or path of the model.")],
    concurrency: Annotated[int, typer.Option(help="Requests that run side by side.")],
    context: Annotated[int, typer.Option(help="Final tokens of a request, completion included.")],
    shared: Annotated[int, typer.Option(help="Tokens of a prefix that all requests share.")] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    as_json: Json = False,
) -> None:
    """Say how large a pool must be so that no request waits for pages."""
    facts = _asked("kvlab.run:size", model, concurrency, context, shared, page_size)
    if as_json:
        _print_json(facts)
    else:
        typer.echo("\n".join(f"{name}: {value}" for name, value in facts.items()))


@app.command()
def run(
    workload: Annotated[str, typer.Option(help=f"{' | '.join(RUN_WORKLOADS)}, or a JSONL file of requests.")],
    model: Annotated[str, typer.Option(help="Name or path of a model, or tracer.")] = "tracer",
    requests: Annotated[int, typer.Option(help="Requests to draw.")] = 32,
    prefix_pages: Annotated[int, typer.Option(help="Pages of the shared prefix.")] = 59,
    tail: Annotated[int, typer.Option(help="Tokens of a request after its prefix.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.")] = 64,
    num_pages: Annotated[int, typer.Option("--pages", help="Pages in the pool, the sink included.")] = 97,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    admission: Annotated[str, typer.Option(help="reserve | peak | none.")] = "reserve",
    admission_order: Annotated[str, typer.Option(help="fifo | backfill.")] = "fifo",
    preemption: Annotated[str | None, typer.Option(help="on | off. [default: on with reserve and peak]")] = None,
    host_pages: Annotated[int, typer.Option(help="Host pages for requests that make room for others.")] = 0,
    host_tier_pages: Annotated[int, typer.Option(help="Host pages for cached pages that are evicted.")] = 0,
    max_concurrent_requests: Annotated[int | None, typer.Option(help="Most requests in flight.")] = None,
    policy: Annotated[
        str, typer.Option(help="Order of eviction: arc | fifo | lfu | lru | priority | random | s3fifo | sieve | slru.")
    ] = "lru",
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse pages.")] = True,
    faults: Annotated[float, typer.Option(help="Share of requests to cancel, and of forwards to fail.")] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Verify every result and every invariant.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSONL file of results; a second run goes on from it.")] = None,
    event_log: Annotated[Path | None, typer.Option(help="JSONL file of events.")] = None,
    as_json: Json = False,
) -> None:
    """Play a workload and say who completed.

    Exit code 0: every request completed, or was cancelled as the workload says; with --faults also when requests failed, since
    that was asked for. 1: a stall, a failed request, a wrong value, a leaked page, or a file that cannot be written. 2: the
    command line, the workload or the result file is wrong. 130: interrupted; with --out the same command goes on.
    """
    if preemption not in (None, "on", "off"):
        raise typer.BadParameter(f"preemption is {preemption!r}; it is on or off", param_hint="--preemption")
    report = _asked(
        "kvlab.run:play",
        workload,
        model,
        shape={
            "requests": requests,
            "prefix_pages": prefix_pages,
            "page_size": page_size,
            "tail": tail,
            "max_tokens": max_tokens,
            "seed": seed,
            "faults": faults,
        },
        engine_options={
            "num_pages": num_pages,
            "page_size": page_size,
            "admission": admission,
            "admission_order": admission_order,
            "preemption": None if preemption is None else preemption == "on",
            "cpu_offload_pages": host_pages,
            "host_tier_pages": host_tier_pages,
            "max_concurrent_requests": max_concurrent_requests,
            "policy": policy,
            "prefix_cache": prefix_cache,
            "seed": seed,
            "event_log": event_log,
        },
        check=check,
        output=out,
    )
    if as_json:
        _print_json(report)
    else:
        typer.echo("\n".join(f"{name}: {_in_words(value)}" for name, value in report.items()))
    is_failure = any(report[name] for name in ("stall", "wrong_values", "leaked_pages", "log_error"))
    if is_failure or (not faults and (report["failed"] or report["not_run"])):
        raise typer.Exit(1)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Say what this model takes instead: a name or a checkpoint folder.")] = None,
    dtype: Annotated[str, typer.Option(help="With --model: of weights and pages.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Say what is installed, which device, memory, weights and backends are usable, and what to install for the rest.

    With --model: how much memory its weights and typical requests take, told from its config.
    """
    if model is None:
        from kvlab.doctor import examine, render

        findings = examine()
    else:
        from kvlab.needs import needs, render

        findings = needs(model, dtype=dtype)
    if as_json:
        _print_json(findings)
    else:
        typer.echo(render(findings))


@notebooks_app.callback(invoke_without_command=True)
def _notebooks(
    context: typer.Context,
    copy: Annotated[Path | None, typer.Option("--copy", help="Copy all notebooks into this folder.")] = None,
) -> None:
    from kvlab import notebooks

    if copy is not None:
        for path in notebooks.copy(copy):
            typer.echo(path)
    elif context.invoked_subcommand is None:
        typer.echo("\n".join(notebooks.names()))
        typer.echo("copy them with: kvlab notebooks --copy DIR")


Names = Annotated[list[str] | None, typer.Argument(help="Notebooks, for example 01_page_sharing; all when none is named.")]


@notebooks_app.command("build")
def build_notebooks(names: Names = None) -> None:
    """Build and execute notebooks from notebooks/src (in a checkout)."""
    from kvlab import notebooks

    for path in notebooks.build(names):
        typer.echo(path)


@notebooks_app.command("check")
def check_notebooks(names: Names = None) -> None:
    """Rebuild notebooks and compare them with what is committed; exit 1 when something differs."""
    from kvlab import notebooks

    problems = notebooks.check(names)
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo("all notebooks are as their sources say")


def _resolve(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _asked(target: str, *args: Any, **options: Any) -> Any:
    """Call ``target``; what it calls wrong input is exit code 2."""
    try:
        return _resolve(target)(*args, **options)
    except InputError as error:
        typer.echo(f"kvlab: {error}", err=True)
        raise typer.Exit(2) from error


def _in_words(value: Any) -> Any:
    """One line for a reader: the sentence of a stall, and "none" where there is nothing."""
    if isinstance(value, dict) and "message" in value:
        return value["message"]
    if isinstance(value, dict):
        return ", ".join(f"{number} for {cause}" for cause, number in value.items()) or "none"
    return "none" if value is None else value


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def _print_rows(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)  # a row of bench index fills 80 columns
    table.add_column("row", no_wrap=True, overflow="fold")
    for column in ("unit", "ours", "reference", "ratio", "target", "ok"):
        table.add_column(column, justify="left" if column in ("unit", "ok") else "right", overflow="fold")
    for row in result["rows"]:
        numbers = (_number(row[column]) for column in ("ours", "reference", "ratio", "target"))
        table.add_row(row["name"], row["unit"], *numbers, {True: "yes", False: "no", None: "-"}[row["ok"]])
    Console().print(table)


def _print_outcome(outcome: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvlab.lab.results import show_value

    table = Table(*outcome.table.columns, title=outcome.table.title, title_justify="left")
    for row in outcome.table.rows:
        table.add_row(*map(show_value, row))
    console = Console()
    console.print(table)
    console.print(f"{outcome.finding[:1].upper()}{outcome.finding[1:]}.", highlight=False, markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"
