"""The demo, end to end over a tiny random model: what it measures, prints, writes and refuses; and over SmolLM2 where it is."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvlab import demo
from kvlab.demo_outcome import Outcome, Pair, show, to_json, verdicts
from kvlab.errors import InputError, LoadError
from kvlab.models import registry
from tests.tiny_checkpoints import make_network, make_tokenizer

POOL: dict[str, Any] = {"page_size": 64, "num_pages": 130, "max_tokens": 12}
NAMES = ["question 1", "question 2", "question 3", "question 4", "turn 1", "turn 2", "stranger"]
REQUEST_FIELDS = {
    "name", "cache", "asked", "prompt_tokens", "cached_tokens", "pages_matched", "ttft_ms", "tokens_per_s", "generated_tokens",
    "finish_reason", "text", "misses", "first_difference", "same_bits",
}  # fmt: skip


def write_model(folder: Path, **tokenizer: Any) -> Path:
    make_network(max_position_embeddings=8192, num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What one run returned, what it printed on a terminal of 80 columns, and its report."""
    printed, path = io.StringIO(), tmp_path_factory.mktemp("report") / "demo.html"
    result = demo.run(model=str(model), out=path, console=Console(file=printed, width=80), **POOL)
    return result, printed.getvalue(), path


def requests(result: dict[str, Any], cache: str) -> list[dict[str, Any]]:
    return [request for request in result["requests"] if request["cache"] == cache]


# -- what it measures --------------------------------------------------------------------------------------------------


def test_every_request_ran_with_the_cache_and_without(ran: Any) -> None:
    for cache in ("on", "off"):
        assert [request["name"] for request in requests(ran[0], cache)] == NAMES
    assert {frozenset(request) for request in ran[0]["requests"]} == {frozenset(REQUEST_FIELDS)}


def test_later_questions_find_the_system_prompt_and_the_stranger_nothing(ran: Any) -> None:
    first, *later = requests(ran[0], "on")[:4]
    stranger = requests(ran[0], "on")[-1]
    assert first["cached_tokens"] == 0
    assert all(0.95 * request["prompt_tokens"] < request["cached_tokens"] < request["prompt_tokens"] for request in later)
    assert all(request["pages_matched"] == request["cached_tokens"] // 64 for request in later)
    assert (stranger["cached_tokens"], [miss["cause"] for miss in stranger["misses"]]) == (0, ["short_prefix"])


def test_turn_two_finds_most_of_turn_one(ran: Any) -> None:
    one, two = requests(ran[0], "on")[4:6]
    assert two["cached_tokens"] >= 0.8 * (one["prompt_tokens"] + one["generated_tokens"])


def test_every_computed_token_has_a_cause(ran: Any) -> None:
    for request in ran[0]["requests"]:
        computed = [token for miss in request["misses"] for token in range(miss["start"], miss["stop"])]
        assert computed == list(range(request["cached_tokens"], request["prompt_tokens"]))
    assert {miss["cause"] for request in requests(ran[0], "off") for miss in request["misses"]} == {"opted_out"}


def test_cold_runs_are_equal_bit_for_bit_and_only_they_are_held_to_it(ran: Any) -> None:
    compared = {request["name"]: request["same_bits"] for request in requests(ran[0], "on")}
    cold = {request["name"] for request in requests(ran[0], "on") if request["cached_tokens"] == 0}
    assert cold >= {"question 1", "turn 1", "stranger"}
    assert compared == {name: True if name in cold else None for name in NAMES}


def test_side_by_side_the_questions_hold_fewer_pages_than_they_list(ran: Any) -> None:
    side, shared_pages = ran[0]["side_by_side"], requests(ran[0], "on")[1]["pages_matched"]
    assert side["requests"] == 6
    assert side["listed_pages"] - side["held_pages"] == 5 * shared_pages


def test_the_verdicts_say_that_all_is_well(ran: Any) -> None:
    said = ran[0]["verdicts"]
    assert list(said) == ["second_turn", "answers_equal", "cold_runs_bit_equal", "stranger_shares_nothing", "pages_are_shared"]
    assert {name for name, verdict in said.items() if not verdict["ok"]} <= {"answers_equal"}  # a hit may round differently


def test_times_to_the_first_token_begin_cold(ran: Any) -> None:
    rows = ran[0]["ttft"]
    assert [row["cached_tokens"] for row in rows] == [0, 128, 256, 384, 448]
    assert all(row["ttft_ms"] > 0 for row in rows)


def test_the_result_is_json(ran: Any) -> None:
    assert json.loads(json.dumps(ran[0])) == ran[0]


# -- what it prints and writes -----------------------------------------------------------------------------------------


def test_the_table_fits_a_terminal_of_80_columns(ran: Any) -> None:
    assert max(map(len, ran[1].splitlines()[:-1])) <= 80
    assert str(ran[2]) in ran[1].splitlines()[-1]  # the path stands whole, so that it can be copied


def test_every_request_cause_and_verdict_is_printed(ran: Any) -> None:
    words = " ".join(ran[1].replace("│", " ").split())
    for name in (*NAMES, "never_seen", "last_page_cap", "short_prefix", "opted_out", "equal, bit for bit"):
        assert name in words
    assert all(verdict["says"] in words for verdict in ran[0]["verdicts"].values())


def test_the_report_is_written_and_shows_the_run(ran: Any) -> None:
    page = ran[2].read_text(encoding="utf-8")
    assert ran[0]["report"] == str(ran[2].resolve())
    for part in (*NAMES, "question 1, cache off", "The prefix tree", "Who owns which page", "Time to the first token"):
        assert part in page
    assert ran[0]["model"]["identity"] in page


def test_as_json_prints_no_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = demo.run(model=str(model), out=tmp_path / "r.html", as_json=True, **POOL | {"max_tokens": 1})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "┏" not in printed.err
    assert {request["generated_tokens"] for request in result["requests"]} == {1}


# -- differences -------------------------------------------------------------------------------------------------------


def outcome_with(on: Any, off: Any) -> Outcome:
    """An outcome in which every request is this pair."""
    pairs = tuple(Pair("?", replace(on, name=name), replace(off, name=name), lambda ids: f"<{ids[0]}>") for name in NAMES)
    model = {"name": "tracer", "identity": "tracer", "dtype": "int64", "device": "cpu", "threads": 1}
    return Outcome(model, 128, 16, pairs, 6, (9, 5), ())


def test_the_first_differing_token_is_named_with_both_ids_and_texts(tracer: Any) -> None:
    on = tracer().generate([5, 6, 7], max_tokens=4, logprobs=1)
    ids = (*on.ids[:2], (on.ids[2] + 1) % 64, on.ids[3])
    outcome = outcome_with(on, replace(on, ids=ids))
    assert outcome.pairs[0].difference == {
        "index": 2,
        "cache_on": {"id": on.ids[2], "text": f"<{on.ids[2]}>"},
        "cache_off": {"id": ids[2], "text": f"<{ids[2]}>"},
    }
    answers = {verdict.name: verdict for verdict in verdicts(outcome)}["answers_equal"]
    assert not answers.ok
    assert f"question 2 parts at token 2: {on.ids[2]} '<{on.ids[2]}>' -> {ids[2]} '<{ids[2]}>'" in answers.says


def test_an_answer_that_ends_earlier_differs_at_its_end(tracer: Any) -> None:
    on = tracer().generate([5, 6, 7], max_tokens=4, logprobs=1)
    pair = outcome_with(on, replace(on, ids=on.ids[:3], logprobs=on.logprobs[:3])).pairs[0]
    assert pair.difference == {"index": 3, "cache_on": {"id": on.ids[3], "text": f"<{on.ids[3]}>"}, "cache_off": None}
    assert pair.compared.endswith("-> the end")


def test_a_cold_run_that_differs_in_one_bit_is_reported(tracer: Any) -> None:
    on = tracer().generate([5, 6, 7], max_tokens=2, logprobs=1)
    moved = {**on.logprobs[1], "logprob": on.logprobs[1]["logprob"] * (1 + 2**-52)}
    said = to_json(outcome_with(on, replace(on, logprobs=(on.logprobs[0], moved))))["verdicts"]
    assert (said["cold_runs_bit_equal"]["ok"], said["answers_equal"]["ok"]) == (False, True)


def test_what_a_terminal_cannot_show_is_replaced(tracer: Any) -> None:
    on = tracer().generate([5, 6, 7], max_tokens=2, logprobs=1)
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii")
    show(outcome_with(replace(on, text="Füße \x1b[31m[red]🙂"), on), Console(file=terminal, width=80))
    terminal.flush()
    assert b"F??e" in raw.getvalue()
    assert b"\x1b[31m" not in raw.getvalue()
    assert b"[red]" in raw.getvalue()


# -- other models, and refusals ----------------------------------------------------------------------------------------


def test_a_model_without_a_chat_template_is_asked_in_plain_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", template=None)
    result = demo.run(model=str(folder), out=tmp_path / "r.html", console=Console(file=io.StringIO()), **POOL)
    one, two = requests(result, "on")[4:6]
    assert two["cached_tokens"] >= 0.8 * (one["prompt_tokens"] + one["generated_tokens"])


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    make_network().save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match=r"asks in words, which this model cannot read: .* no tokenizer"):
        demo.run(model=str(tmp_path / "bare"), out=tmp_path / "r.html", console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": 1}, "num_pages is 1"),
        ({"num_pages": 20}, r"\b19\b"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(model: Path, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        demo.run(model=str(model), out=tmp_path / "r.html", console=Console(file=io.StringIO()), **POOL | wrong)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_size": 0}, "page_size is 0; it must be a whole number of at least 1"),
        ({"num_pages": 1}, "num_pages is 1; it must be a whole number of at least 2"),
        ({"num_pages": True}, "num_pages is True"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
    ],
)
def test_a_setting_that_no_model_could_take_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        demo.run(model="no-such-model", out=tmp_path / "r.html", console=Console(file=io.StringIO()), **wrong)


def test_a_pool_that_holds_no_two_questions_at_once_still_ends_in_a_report(model: Path, tmp_path: Path) -> None:
    printed = io.StringIO()
    result = demo.run(
        model=str(model), out=tmp_path / "r.html", console=Console(file=printed), **POOL | {"num_pages": 57, "max_tokens": 4}
    )
    assert result["side_by_side"]["held_pages"] <= 56  # they waited at the gate for one another
    assert (tmp_path / "r.html").exists()


def test_a_place_that_cannot_take_the_report_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder to write in"):
        demo.run(model=str(tmp_path / "no model"), out=tmp_path / "no" / "such" / "r.html")


def test_a_folder_gets_the_report_under_its_usual_name(model: Path, tmp_path: Path) -> None:
    result = demo.run(
        model=str(model), out=tmp_path, console=Console(file=io.StringIO()), **POOL | {"num_pages": 57, "max_tokens": 1}
    )
    assert Path(result["report"]) == (tmp_path / "kvlab-demo.html").resolve()
    assert (tmp_path / "kvlab-demo.html").is_file()


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        demo.run(model=str(tmp_path / "gone"), out=tmp_path / "r.html", console=Console(file=io.StringIO()))


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_serves_turn_two_from_turn_one_and_cold_runs_are_bit_equal(tmp_path: Path) -> None:
    if registry.find("smollm2-135m") is None:
        pytest.skip("the weights of smollm2-135m are not here; run: kvlab fetch smollm2-135m")
    result = demo.run(out=tmp_path / "r.html", max_tokens=16, console=Console(file=io.StringIO()))
    one, two = requests(result, "on")[4:6]
    assert two["cached_tokens"] >= 0.8 * (one["prompt_tokens"] + one["generated_tokens"])
    assert "142 steps" in requests(result, "on")[1]["text"]
    assert {name for name, verdict in result["verdicts"].items() if not verdict["ok"]} <= {"answers_equal"}
