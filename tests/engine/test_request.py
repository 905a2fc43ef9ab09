"""What a result says of itself."""

from __future__ import annotations

from kvlab.engine.request import MissTable, RequestOptions
from kvlab.spec import Miss


def test_a_reset_is_not_told_as_an_eviction_for_room(tracer) -> None:
    engine = tracer(page_size=4)
    engine.generate(list(range(1, 20)), max_tokens=1)
    engine.reset_prefix_cache()
    shown = repr(engine.generate(list(range(1, 20)), max_tokens=1).misses)
    assert "main[0:16] evicted, dropped by a reset (asked)" in shown


def test_an_eviction_for_room_is_told_by_its_cause_alone() -> None:
    rows = [Miss("main", 0, 4, "evicted", "evicted at step 3 for request 7"), Miss("main", 4, 9, "never_seen", "no such chain")]
    assert repr(MissTable(rows)) == "MissTable(main[0:4] evicted, main[4:9] never_seen)"


def test_the_deadlines_that_were_asked_for_are_told_and_no_others() -> None:
    assert RequestOptions(deadline_steps=3).deadlines == "deadline_steps is 3"
    assert RequestOptions(deadline_s=0.5, deadline_steps=3).deadlines == "deadline_s is 0.5, deadline_steps is 3"
    assert RequestOptions().deadlines == ""
