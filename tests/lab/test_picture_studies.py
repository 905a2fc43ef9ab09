"""Studies of pictures, over a random BAGEL: what they compare is not vacuous, and what they inject goes where they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_bagel
import torch
from tiny_bagel import TEXT

from kvlab.errors import InputError
from kvlab.lab import picture_studies as studies
from kvlab.lab.pixels import compare_pictures
from kvlab.spec import draw

pytest.importorskip("diffusers", reason="needs the extra bagel")

SHORT: dict[str, Any] = {"num_timesteps": 4}
SCENE = "a yellow triangle on a black background"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from kvlab.models.loading import load_model

    return load_model(tiny_bagel.write_folder(tmp_path_factory.mktemp("bagel") / "tiny"), device="cpu")


@pytest.fixture
def make(model: Any, engine_over: Any) -> Callable[..., Any]:
    return lambda **settings: engine_over(model, **({"num_pages": 128, "page_size": 4} | settings))


# -- cold, hit, cold again ---------------------------------------------------------------------------------------------


def test_a_triplet_is_cold_a_hit_of_whole_pages_and_cold_again(make: Any) -> None:
    found = studies.draw_triplet(make(), draw(TEXT, **SHORT), seed=3)
    assert [result.cached_tokens for result in (found.cold, found.hit, found.again)] == [0, 12, 0]
    assert found.hit.cached_by_label == {"main": 12, "cfg_img": 12}
    assert compare_pictures(found.cold, found.again).is_equal


def test_another_seed_is_another_picture_and_the_same_one_is_not(make: Any) -> None:
    engine = make()
    one, same, other = (engine.generate(draw(TEXT, **SHORT), seed=seed) for seed in (0, 0, 1))
    assert compare_pictures(one, same).max_abs <= 1
    assert compare_pictures(one, other).share_over(0) > 0.5


def test_a_comparison_without_a_hit_is_refused(make: Any) -> None:
    with pytest.raises(InputError, match="found none of its 14 slots cached"):
        studies.draw_triplet(make(page_size=16), draw(TEXT, **SHORT))
    with pytest.raises(InputError, match="found none of its 14 slots cached"):
        studies.draw_triplet(make(prefix_cache=False), draw(TEXT, **SHORT))


def test_a_row_says_what_it_was_made_with(make: Any) -> None:
    guided, plain = (studies.cold_against_hit(make(), TEXT, guided=guided, **SHORT)[1] for guided in (True, False))
    assert (guided.dtype, guided.num_timesteps, guided.is_guided) == ("float32", 4, True)
    assert (guided.cached_slots, plain.cached_slots, plain.is_guided) == (
        24,
        12,
        False,
    )  # without guidance main alone is written
    assert guided.again.is_equal
    assert guided.drift.max_abs <= 1


def test_settings_are_every_guidance_by_every_schedule(make: Any) -> None:
    rows = studies.drift_by_setting(make(), TEXT, (3, 4))
    assert [(row.is_guided, row.num_timesteps) for row in rows] == [(True, 3), (True, 4), (False, 3), (False, 4)]


def test_each_row_was_matched_as_far_as_it_says(make: Any) -> None:
    rows = studies.drift_against_match(make(), TEXT, **SHORT)
    assert [(row.cached_tokens, row.cached_slots) for row in rows] == [(4, 4), (8, 8), (12, 12)]
    with pytest.raises(InputError, match="5 of 14 tokens are not whole pages of 4"):
        studies.drift_against_match(make(), TEXT, [5], **SHORT)


# -- injected noise ----------------------------------------------------------------------------------------------------


def test_noise_is_relative_and_goes_into_the_given_pages_alone(make: Any) -> None:
    engine = make()
    result = engine.generate(draw(TEXT, **SHORT), max_tokens=0, seed=0)
    pages, before = studies.filed_pages(engine, result.rid), engine.attention.store.pages.clone()
    studies.put_noise(engine, pages, -4, seed=1)
    after = engine.attention.store.pages
    others = [page for page in range(engine.kv.usable_pages + 1) if page not in pages]
    relative = (after[:, :, pages] / before[:, :, pages] - 1) / 2**-4
    assert len(pages) == 6  # three of each label
    assert torch.equal(after[:, :, others], before[:, :, others])
    assert 0.8 < relative.std() < 1.2
    assert abs(relative.mean()) < 0.1


def test_more_noise_moves_more_pixels_further(make: Any) -> None:
    rows = studies.noise_sensitivity(make(), draw(TEXT, **SHORT), (-10, -3))
    assert [(row.log2_noise, row.cached_tokens) for row in rows] == [(-10, 12), (-3, 12)]
    assert rows[0].drift.share_over(0) < rows[1].drift.share_over(0)
    assert rows[0].drift.max_abs < rows[1].drift.max_abs


def test_no_noise_is_left_in_the_cache(make: Any) -> None:
    engine = make()
    clean = engine.generate(draw(TEXT, **SHORT), seed=0)
    studies.draw_from_noise(engine, draw(TEXT, **SHORT), -3)
    later = engine.generate(draw(TEXT, **SHORT), seed=0)
    assert later.cached_tokens == 0
    assert compare_pictures(clean, later).is_equal


# -- a sweep of seeds --------------------------------------------------------------------------------------------------


def test_a_sweep_computes_the_prompt_once_with_reuse_and_each_time_without(make: Any) -> None:
    rows = studies.guided_sweep(make, draw(TEXT, **SHORT), range(3))
    computed = {reuse: [row.computed_slots for row in rows if row.reuse is reuse] for reuse in (False, True)}
    assert computed == {False: [28, 28, 28], True: [28, 4, 4]}
    assert {row.prompt_slots for row in rows} == {28}
    assert all(0 < row.prefill_ms < row.total_ms for row in rows)


def test_totals_are_those_of_the_rows(make: Any) -> None:
    rows = studies.guided_sweep(make, draw(TEXT, **SHORT), range(2))
    totals = studies.sweep_totals(rows)
    assert (totals["seeds"], totals["computed_slots_without"], totals["computed_slots_with"]) == (2, 56, 32)
    assert totals["saved_slots_share"] == round(24 / 56, 4)


# -- the wrong-walk fault ----------------------------------------------------------------------------------------------


def test_keys_that_know_the_walk_find_nothing_and_keys_that_ignore_it_find_a_picture(make: Any) -> None:
    scene = make().generate(draw(SCENE, **SHORT), seed=0).image
    found = studies.wrong_walk(make, scene, TEXT, **SHORT)
    right, wrong = studies.wrong_walk_drifts(found)
    assert (found.right.cached_tokens, right.is_equal) == (0, True)
    assert (found.wrong.cached_tokens, wrong.is_equal) == (12, False)
    assert wrong.share_over(0) > 0.5


def test_what_was_drawn_on_wrong_keys_says_so(make: Any) -> None:
    scene = make().generate(draw(SCENE, **SHORT), seed=0).image
    found = studies.wrong_walk(make, scene, TEXT, **SHORT)
    assert "ignore-walk" in found.wrong.name
    assert [drift.name for drift in studies.wrong_walk_drifts(found)] == ["keys that know the walk", "keying=ignore-walk"]
