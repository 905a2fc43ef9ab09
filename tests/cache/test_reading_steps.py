"""Steps that store nothing, labels that are trimmed one by one, and keys that ignore who wrote."""

from __future__ import annotations

import pytest
from kv_driver import (
    MEDIA,
    NODE,
    UNDERSTANDING,
    MediaDriver,
    keyed,
    laid_out,
    media_driver,
    picture,
    step_of,
    text,
)

from kvlab.errors import InputError, IntegrityError
from kvlab.spec import (
    Block,
    Fork,
    Prefix,
    PrefixStream,
    RequestConfig,
    Segment,
    Step,
    StepContext,
    WalkInputs,
)

# -- steps that store nothing


def reading_step(*segments: Segment) -> tuple[Step, StepContext]:
    return Step(0, NODE, "image_gen", segments, commit=False), StepContext(frozenset(s.rid for s in segments))


def test_a_step_without_commit_reads_what_is_stored_and_grows_nothing():
    d = media_driver()
    d.ingest(1, [text(20), picture(30)])
    d.prefill(1)
    pages = list(d.kv.stream(1).page_indices)
    segments = [Segment(1, "main", 18, 0), Segment(1, "cfg_text", 18, 0, Prefix("main", 20, 20)), Segment(1, "cfg_img", 18, 0)]
    step, ctx = reading_step(*segments)
    for _ in range(3):
        assert d.kv.admit(step, ctx) is None
        tables = d.kv.plan(step, ctx)
        d.kv.commit(step, ctx)
    assert not tables.commit
    assert [(row.label, list(row.pages), row.length, row.to_compute) for row in tables.rows] == [
        ("main", pages, 50, 18),
        ("cfg_text", pages[:2], 20, 18),
        ("cfg_img", [], 0, 18),
    ]
    assert (d.kv.stream(1).page_indices, d.kv.stored_tokens(1)) == (pages, 50)
    assert d.kv.stream(1).chain is not None


def test_b27_a_step_without_commit_files_nothing():
    d = media_driver()
    d.ingest(1, [text(20)])
    d.prefill(1)
    indexed = set(d.kv.index.pages())
    step, ctx = reading_step(Segment(1, "main", 100, 0))
    d.kv.admit(step, ctx)
    d.kv.plan(step, ctx)
    d.kv.commit(step, ctx)
    assert set(d.kv.index.pages()) == indexed


def test_a_prompt_served_whole_is_read_by_a_step_without_commit():
    d = media_driver()
    prompt = [text(20), picture(30)]
    d.serve(1, prompt)
    d.ingest(2, prompt)
    d.prefill(2)
    step, ctx = reading_step(Segment(2, "main", 18, 0), Segment(2, "cfg_text", 18, 0, Prefix("main", 50, 21)))
    assert d.kv.admit(step, ctx) is None
    assert [row.length for row in d.kv.plan(step, ctx).rows] == [50, 50]
    d.kv.commit(step, ctx)
    assert not d.kv.stream(2).converted
    d.kv.remove_request(2)
    d.kv.check()


def test_a_prefix_longer_than_what_is_stored_is_refused():
    d = media_driver()
    d.ingest(1, [text(20)])
    d.prefill(1)
    step, ctx = reading_step(Segment(1, "cfg_text", 18, 0, Prefix("main", 21, 21)))
    d.kv.admit(step, ctx)
    with pytest.raises(InputError, match="first 21 slots"):
        d.kv.plan(step, ctx)


def test_a_step_that_commits_reads_no_other_stream():
    d = media_driver()
    d.ingest(1, [text(20)])
    step = Step(0, NODE, "prefill_text", (Segment(1, "cfg_text", 4, None, Prefix("main", 0, 0)),))
    with pytest.raises(InputError, match="commits"):
        d.kv.admit(step, StepContext(frozenset({1})))


def test_padding_of_a_step_without_commit_reads_nothing():
    d = media_driver()
    step, _ = reading_step(Segment(9, "main", 18, 0))
    (row,) = d.kv.plan(step, StepContext(frozenset())).rows
    assert (list(row.pages), row.length, row.to_compute) == ([], 0, 18)


# -- guided prefill: two labels, each with its own chain

GUIDED = MEDIA | {"cfg_img": PrefixStream("cfg_img", walk="prefill_text", trims_guided=True)}


def guided(d: MediaDriver, rid, count: int = 40) -> tuple[dict[str, int], int]:
    """A text for main and cfg_img, then a picture for main; returns the text's hits, and what was served of the picture."""
    spans, ids = [text(count), picture(30)], list(range(count))
    d.prompts[rid] = spans, ids
    prompts = {"main": laid_out(spans, ids, 16), "cfg_img": keyed(ids, 16, grows=False)}
    d.kv.ingest_request(rid, RequestConfig(prompts))
    inputs = WalkInputs({"main": ids, "cfg_img": ids})
    matches = d.kv.resolve_cached_prefix(rid, NODE, "prefill_text", inputs)
    d.kv.apply_cached_prefix(rid, NODE, "prefill_text", inputs, matches)
    hits = {label: match.slots for label, match in matches.items()}
    rows = tuple(Segment(rid, label, count - hit) for label, hit in hits.items() if hit < count)
    step, ctx = Step(0, NODE, "prefill_text", rows), StepContext(frozenset({rid}))
    assert d.kv.admit(step, ctx) is None
    assert [row.length for row in d.kv.plan(step, ctx).rows] == [count] * len(rows)
    d.kv.commit(step, ctx)
    block = WalkInputs({}, blocks={"main": Block(30, 1)})
    match = d.kv.resolve_cached_prefix(rid, NODE, "prefill_vit", block)
    if match:
        d.kv.apply_cached_prefix(rid, NODE, "prefill_vit", block, match)
    served = match["main"].slots if match else 0
    if not served:
        step, ctx = step_of("prefill_vit", {rid: 30})
        d.kv.admit(step, ctx)
        d.kv.plan(step, ctx)
        d.kv.commit(step, ctx)
    return hits, served


def test_each_label_of_a_guided_prefill_is_trimmed_by_its_own_match():
    d = media_driver(walks=GUIDED)
    assert guided(d, 1) == ({"main": 0, "cfg_img": 0}, 0)
    assert guided(d, 2) == ({"main": 40, "cfg_img": 32}, 30)
    assert d.kv.stored_tokens(2, "cfg_img") == 40
    assert d.kv.stored_tokens(2) == 0  # still a lease


def test_a_label_served_whole_is_asked_again_when_the_others_step_was_refused():
    d = media_driver(walks=GUIDED)
    guided(d, 1)
    ids = list(range(40))
    spans = [text(40), picture(30)]
    d.kv.ingest_request(2, RequestConfig({"main": laid_out(spans, ids, 16), "cfg_img": keyed(ids, 16, grows=False)}))
    inputs = WalkInputs({"main": ids, "cfg_img": ids})
    for _ in range(3):
        matches = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", inputs)
        assert {label: match.slots for label, match in matches.items()} == {"main": 40, "cfg_img": 32}
        d.kv.apply_cached_prefix(2, NODE, "prefill_text", inputs, matches)


def test_a_pre_fork_copies_what_was_there_before_the_walk_and_never_the_match():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.walk(2, 1)
    hit = d.probe(2, 2).slots
    step, ctx = step_of("prefill_text", {2: 25 - hit}, forks=[Fork(2, "main", "cfg_text")])
    assert d.kv.admit(step, ctx) is None
    d.kv.plan(step, ctx)
    assert d.kv.stored_tokens(2, "cfg_text") == 50
    d.kv.commit(step, ctx)


# -- the historical fault, on request


def test_b1_ignoring_walks_files_pictures_under_the_keys_of_texts():
    found = {}
    for keying in ("walk", "ignore-walk"):
        d = media_driver(keying=keying)
        d.kv.ingest_request(1, RequestConfig({"main": keyed(range(40), 16)}))
        d.prompts[1] = [picture(50)], []
        d.run(1, "prefill_vae", 50)
        d.kv.remove_request(1)
        d.kv.ingest_request(2, RequestConfig({"main": keyed(range(40), 16)}))
        answer = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", WalkInputs({"main": range(40)}))
        found[keying] = answer["main"].slots
    assert found == {"walk": 0, "ignore-walk": 32}


def test_b27_a_guided_edit_hits_no_pictures_pages():
    d = media_driver()
    edit = [picture(30, b"red", "prefill_vae"), picture(20), text(40)]
    d.serve(1, edit)
    assert d.serve(2, [text(40)]) == [0]


def test_b27_ignoring_walks_a_laid_out_edit_is_keyed_by_its_ids_alone():
    d = media_driver(keying="ignore-walk")
    d.ingest(1, [picture(30, b"red", "prefill_vae"), picture(20), text(40)])
    d.run(1, "prefill_vae", 30)
    d.kv.ingest_request(2, RequestConfig({"main": keyed(range(40), 16)}))
    answer = d.kv.resolve_cached_prefix(2, NODE, "prefill_text", WalkInputs({"main": range(40)}))
    assert answer["main"].slots == 16


def test_an_unknown_keying_is_refused():
    with pytest.raises(InputError, match="keying is 'walks'"):
        media_driver(keying="walks")


def test_the_fault_is_named_wherever_the_resource_is():
    plain, faulty = media_driver().kv, media_driver(keying="ignore-walk").kv
    assert "ignore-walk" in repr(faulty)
    assert "keying" not in repr(plain)
    assert faulty.root_fields()["keying"] == "ignore-walk"
    assert not plain.root_fields()["keying"]


def test_an_unagreed_lease_that_served_part_of_a_page_is_an_error():
    d = media_driver()
    d.serve(1, UNDERSTANDING)
    d.ingest(2, UNDERSTANDING)
    d.walk(2, 0)
    d.kv.resolve_cached_prefix(2, NODE, "prefill_vit", d.inputs(2, 1))
    with pytest.raises(IntegrityError, match="not cut to its lease"):
        d.run(2, "prefill_vit", 30)
