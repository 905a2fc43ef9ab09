"""Times, steps and guidance as plain functions: what the numbers mean, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvlab.errors import InputError
from kvlab.models.bagel.flow import RENORMS, Guidance, euler_step, guide, timesteps


def velocities(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("num_timesteps", [1, 0, -3, 2.0, True, None, "50"])
def test_fewer_than_two_times_are_refused(num_timesteps):
    with pytest.raises(InputError, match=f"num_timesteps is {num_timesteps!r}; at least 2"):
        timesteps(num_timesteps, 3.0)


@pytest.mark.parametrize("shift", [0, -1.0, float("nan")])
def test_a_shift_that_is_not_above_zero_is_refused(shift):
    with pytest.raises(InputError, match="timestep_shift"):
        timesteps(5, shift)


def test_steps_along_the_straight_way_arrive_at_the_picture():
    picture, noise = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    x, times = noise, timesteps(9, 3.0)
    for t, t_next in zip(times[:-1], times[1:], strict=True):  # noqa: RUF007
        x = euler_step(x, noise - picture, t, t_next)
    torch.testing.assert_close(x, picture, rtol=0, atol=1e-5)


@pytest.mark.parametrize("renorm", RENORMS)
def test_scales_of_one_change_nothing(renorm):
    main, text, img = velocities()
    torch.testing.assert_close(guide(main, text, img, Guidance(1.0, 1.0, renorm=renorm)), main, rtol=1e-5, atol=1e-5)


def test_global_keeps_the_length_of_all_values():
    main, text, img = velocities()
    guided = guide(main, text, img, Guidance(4.0, 1.5, renorm="global"))
    torch.testing.assert_close(guided.norm(), main.norm())


def test_channel_keeps_the_length_of_each_token():
    main, text, img = velocities()
    guided = guide(main, text, img, Guidance(4.0, 1.5, renorm="channel"))
    torch.testing.assert_close(guided.norm(dim=-1), main.norm(dim=-1))


def test_text_channel_keeps_the_length_before_pictures_guide():
    main, text, img = velocities()
    only_text = guide(main, text, None, Guidance(4.0, 1.0, renorm="text_channel"))
    torch.testing.assert_close(only_text.norm(dim=-1), main.norm(dim=-1))
    both = guide(main, text, img, Guidance(4.0, 2.0, renorm="text_channel"))
    torch.testing.assert_close(both, img + 2.0 * (only_text - img))


def test_renorm_min_is_the_least_factor():
    main, text, _ = velocities()
    plain = text + 40.0 * (main - text)
    guided = guide(main, text, None, Guidance(40.0, 1.0, renorm="global", renorm_min=0.5))
    torch.testing.assert_close(guided, 0.5 * plain)


def test_a_shorter_velocity_is_never_stretched():
    main = torch.ones(2, 4)
    guided = guide(main, 1.2 * main, None, Guidance(3.0, 1.0, renorm="channel"))
    torch.testing.assert_close(guided, 0.6 * main)


def test_pictures_that_guide_need_their_context():
    main, text, _ = velocities()
    with pytest.raises(InputError, match=r"cfg_img_scale 2\.0 needs .* cfg_img"):
        guide(main, text, None, Guidance(4.0, 2.0))


def test_an_image_scale_alone_guides_nothing():
    alone = Guidance(text_scale=1.0, img_scale=2.0, interval=(0.0, 1.0))
    assert not alone.uses_pictures
    assert not any(alone.is_active(t) for t in (0.1, 0.5, 1.0))


@pytest.mark.parametrize(("t", "active"), [(1.0, True), (0.41, True), (0.4, False), (0.1, False)])
def test_the_interval_is_open_below_and_closed_above(t, active):
    assert Guidance(4.0, interval=(0.4, 1.0)).is_active(t) is active


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"renorm": "local"}, "known are global, channel, text_channel"),
        ({"renorm_min": 1.5}, "cfg_renorm_min"),
        ({"interval": (0.6, 0.4)}, "low <= high"),
        ({"interval": (-1, 0.4)}, "cfg_interval"),
    ],
)
def test_guidance_that_cannot_be_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Guidance(**fields)
