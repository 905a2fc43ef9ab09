"""A picture between its passes: what it needs next, and that nothing is guided by a context that did not run."""

from __future__ import annotations

import json

import golden_bagel as golden
import pytest
import torch

from kvlab.errors import IntegrityError
from kvlab.models.bagel.canvas import Canvas
from kvlab.models.bagel.flow import Guidance
from kvlab.models.bagel.settings import Drawing

THREE, TWO, ONE = ("main", "cfg_text", "cfg_img"), ("main", "cfg_text"), ("main",)


def canvas(num_timesteps: int = 7, **guidance) -> Canvas:
    drawing = Drawing(48, 64, num_timesteps, 3.0, Guidance(**guidance))
    return Canvas(drawing, (3, 4), torch.zeros(12, 64))


@pytest.mark.parametrize(
    ("guidance", "branches"),
    [
        ({"text_scale": 4.0, "img_scale": 1.5, "interval": (0.4, 1.0)}, [THREE] * 5 + [ONE]),
        ({"text_scale": 4.0, "img_scale": 1.0, "interval": (0.4, 1.0)}, [TWO] * 5 + [ONE]),
        ({"text_scale": 4.0, "img_scale": 1.5, "interval": (0.0, 1.0)}, [THREE] * 6),
        ({"text_scale": 1.0, "img_scale": 1.5, "interval": (0.0, 1.0)}, [ONE] * 6),
        ({"text_scale": 4.0, "img_scale": 1.5, "interval": (0.4, 0.9)}, [ONE] * 2 + [THREE] * 3 + [ONE]),
    ],
)
def test_contexts_of_each_evaluation(guidance, branches):
    drawn, seen = canvas(**guidance), []
    while not drawn.is_done:
        seen.append(drawn.branches())
        drawn.follow(torch.zeros(12, 64))
    assert seen == branches


@pytest.mark.parametrize("missing", ["main", "cfg_text", "cfg_img"])
def test_a_missing_context_is_an_error(missing):
    velocities = {label: torch.ones(12, 64) for label in THREE if label != missing}
    with pytest.raises(IntegrityError, match=f"no velocity of {missing}"):
        canvas(img_scale=2.0).combine(velocities)


@pytest.mark.parametrize("schedule", json.loads(golden.table("timesteps.json")))
def test_k18_3_points_of_a_schedule_are_one_more_than_its_evaluations(schedule):
    num_timesteps, shift = schedule.split(",")
    drawn = Canvas(Drawing(48, 64, int(num_timesteps), float(shift), Guidance()), (3, 4), torch.zeros(12, 64))
    times = []
    while not drawn.is_done:
        times.append(drawn.t)
        drawn.follow(torch.ones(12, 64))
    assert len(times) == int(num_timesteps) - 1
    assert times == json.loads(golden.table("timesteps.json"))[schedule]
    torch.testing.assert_close(drawn.latents, torch.full((12, 64), -1.0))  # the steps add up to 1


def test_k18_3_five_points_at_shift_3():
    drawn, times = canvas(5), []
    while not drawn.is_done:
        times.append(drawn.t)
        drawn.follow(torch.zeros(12, 64))
    assert [*times, drawn.t] == pytest.approx([1, 0.9, 0.75, 0.5, 0])


def test_an_unguided_velocity_is_mains():
    velocity = torch.randn(12, 64, dtype=torch.bfloat16)
    combined = canvas(text_scale=1.0).combine({"main": velocity})
    assert combined.dtype == torch.float32
    assert torch.equal(combined, velocity.float())
