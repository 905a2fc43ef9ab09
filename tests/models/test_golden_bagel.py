"""Every case of the released code through an engine: cold and after a hit, at several page sizes."""

from __future__ import annotations

import golden_bagel as golden
import pytest
from watched_bagel import Watched, check, load_watched_model

from kvlab.models.bagel.spec import BagelModel

pytest.importorskip("diffusers")
pytest.importorskip("PIL")

#: Cases with a prompt of at least a page and a token: a hit is possible.
HITS = [(4, case) for case in golden.names() if case != "04_vae"]
HITS += [(16, case) for case in golden.names() if case[:2] in ("01", "02", "03", "06", "07", "08", "09")]
#: Slots that each context of a guided drawing reads.
ROWS = {
    "05_t2i_global_0_1": {"main": 10, "cfg_text": 0, "cfg_img": 10},
    "06_edit_textchannel_0_1": {"main": 41, "cfg_text": 31, "cfg_img": 10},
    "07_think_t2i": {"main": 49, "cfg_text": 35, "cfg_img": 43},
    "08_text_image_text": {"main": 49, "cfg_text": 39, "cfg_img": 18},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> BagelModel:
    return load_watched_model(tmp_path_factory.mktemp("bagel") / "model")


@pytest.mark.parametrize("page_size", [4, 16, 128])
@pytest.mark.parametrize("case", golden.names())
def test_cold(model, case, page_size):
    with Watched(model, page_size) as watched:
        assert check(watched, case).cached_tokens == 0


@pytest.mark.parametrize(("page_size", "case"), HITS)
def test_after_a_hit(model, case, page_size):
    with Watched(model, page_size) as watched:
        check(watched, case)
        assert check(watched, case).cached_tokens > 0


@pytest.mark.parametrize("is_hit", [False, True], ids=["cold", "hit"])
@pytest.mark.parametrize("case", ROWS)
def test_slots_that_each_context_reads(model, case, is_hit):
    with Watched(model, 4) as watched:
        for _ in range(1 + is_hit):
            result = check(watched, case)
        assert (result.cached_tokens > 0) == is_hit
        assert {s.row.label: s.row.length for s in watched.seen if s.walk == "image_gen" and s.out is not None} == {
            "main": ROWS[case]["main"]
        }
        read = {label: {s.row.length for s in watched.rows("image_gen", label)} for label in ROWS[case]}
        assert read == {label: {rows} for label, rows in ROWS[case].items()}
