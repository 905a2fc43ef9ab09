import pytest

from kvlab.engine.positions import Positions
from kvlab.spec import Fork, Match, Prefix, RequestConfig, Segment, Step, StepContext, WalkInputs


class Stream:
    """One request of a Positions, fed the way an engine does."""

    def __init__(self, positions=None, rid=1):
        self.positions, self.rid = positions or Positions(), rid
        self.positions.ingest_request(rid, RequestConfig())

    def hit(self, slots, label="main"):
        inputs = WalkInputs({label: range(slots + 1)})
        self.positions.apply_cached_prefix(self.rid, "LLM", "prefill", inputs, {label: Match(slots, slots)})

    def step(self, span, label="main", *, advance=None, prefix=None, forks=(), commit=True, ran=True):
        """Plan a step of ``span`` tokens, and commit it if it ``ran``; returns the rope ids."""
        segment = Segment(self.rid, label, span, advance, prefix)
        step = Step(0, "LLM", "prefill", (segment,), forks=forks, commit=commit)
        ctx = StepContext(frozenset({self.rid}))
        ids = self.positions.plan(step, ctx)[self.rid, label]
        if ran:
            self.positions.commit(step, ctx)
        else:
            self.positions.abort(step, ctx)
        return list(ids)


def test_b19_after_a_hit_of_96_the_next_step_reads_96_to_99():
    s = Stream()
    s.hit(96)
    assert s.step(4) == [96, 97, 98, 99]
    assert s.step(1) == [100]


def test_b19_a_stale_smaller_match_does_not_rewind():
    s = Stream()
    s.hit(96)
    s.hit(32)
    assert s.step(4) == [96, 97, 98, 99]
    s.hit(96)
    assert s.step(1) == [100]


def test_b19_another_label_and_another_request_start_at_zero():
    s = Stream()
    s.hit(96)
    assert s.step(2, "cfg_img") == [0, 1]
    assert Stream(s.positions, rid=2).step(2) == [0, 1]


def test_b19_reset_forgets():
    s = Stream()
    s.hit(96)
    s.positions.reset_request(s.rid)
    assert s.step(3) == [0, 1, 2]


def test_remove_forgets():
    s = Stream()
    s.step(5)
    s.positions.remove_request(s.rid)
    assert s.positions.counter(s.rid) == 0


@pytest.mark.parametrize(("hit", "chunk"), [(0, 8), (0, 16), (0, 40), (16, 8), (16, 16), (32, 40)])
def test_k19_4_decode_positions_do_not_depend_on_chunks_or_hits(hit, chunk):
    s = Stream()
    if hit:
        s.hit(hit)
    spans = [min(chunk, 40 - start) for start in range(hit, 40, chunk)]
    assert [p for span in spans for p in s.step(span)] == list(range(hit, 40))
    assert [s.step(1) for _ in range(3)] == [[40], [41], [42]]


def test_k19_1_a_chunk_has_as_many_positions_as_tokens():
    s = Stream()
    assert (s.step(32), s.step(8)) == (list(range(32)), list(range(32, 40)))
    hit = Stream()
    hit.hit(16)
    assert (hit.step(16), hit.step(8)) == (list(range(16, 32)), list(range(32, 40)))


def test_a_step_that_did_not_run_or_does_not_commit_moves_nothing():
    s = Stream()
    assert s.step(4, ran=False) == s.step(4, commit=False) == s.step(4) == [0, 1, 2, 3]


def test_padding_rows_leave_no_counter():
    positions = Positions()
    step = Step(0, "LLM", "decode", (Segment(-1, "main", 1),))
    positions.commit(step, StepContext(frozenset({1})))
    assert positions.counter(-1) == 0


def test_a_fork_before_the_write_copies_the_counter_before_it_and_one_after_copies_it_after():
    s = Stream()
    s.step(10)
    s.step(4, forks=(Fork(s.rid, "main", "early", "pre"), Fork(s.rid, "main", "late", "post")))
    assert (s.positions.counter(s.rid, "early"), s.positions.counter(s.rid, "late")) == (10, 14)


def test_a_write_on_a_fork_target_continues_the_source():
    s = Stream()
    s.step(10)
    assert s.step(2, "branch", forks=(Fork(s.rid, "main", "branch", "pre"),)) == [10, 11]
    assert s.positions.counter(s.rid, "branch") == 12


def test_ingest_twice_keeps_the_counter():
    s = Stream()
    s.step(5)
    s.positions.ingest_request(s.rid, RequestConfig())
    assert s.step(1) == [5]


def test_root_fields_name_the_whole_rotation_whatever_the_order_of_its_keys():
    a = Positions({"rope_theta": 5e5, "scaling": {"factor": 32, "low": 1}}).root_fields()
    b = Positions({"scaling": {"low": 1, "factor": 32}, "rope_theta": 5e5}).root_fields()
    assert a == b == {"scheme": "sequential", "rope_theta": 5e5, "scaling.factor": 32, "scaling.low": 1}


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_all_slots_of_a_picture_stand_at_one_position_and_the_next_is_one_further():
    s = Stream()
    assert s.step(3) == [0, 1, 2]
    assert s.step(5, advance=1) == [3] * 5
    assert s.step(2) == [4, 5]


def test_what_is_drawn_stands_where_the_text_ended_in_every_pass():
    s = Stream()
    s.step(3)
    assert [s.step(4, advance=0, commit=False) for _ in range(2)] == [[3] * 4] * 2
    assert s.step(1) == [3]


def test_a_row_that_reads_a_prefix_stands_after_it_and_moves_nothing():
    s = Stream()
    s.step(10)
    assert s.step(2, "cfg_text", advance=0, commit=False, prefix=Prefix("main", 40, 7)) == [7, 7]
    assert (s.positions.counter(1), s.positions.counter(1, "cfg_text")) == (10, 0)


@pytest.mark.parametrize(
    ("cached", "chunk", "want"),
    [(0, 32, [range(32), range(32, 40)]), (16, 16, [range(16, 32), range(32, 40)])],
    ids=["cold", "hit"],
)
def test_k19_1_tokens_and_positions_are_cut_at_the_same_two_ends(tracer, monkeypatch, cached, chunk, want):
    engine = tracer(page_size=16, max_step_tokens=chunk)
    prompt, fed = [1 + i % 60 for i in range(40)], []
    if cached:
        engine.generate(prompt[: cached + 1], max_tokens=1)
    forward = engine.model.forward

    def recorded(walk, rows, attention):
        fed.extend((list(row.ids), list(row.positions)) for row in rows if walk == "prefill")
        return forward(walk, rows, attention)

    monkeypatch.setattr(engine.model, "forward", recorded)
    assert engine.generate(prompt, max_tokens=1).cached_tokens == cached
    assert fed == [([prompt[i] for i in part], list(part)) for part in want]
