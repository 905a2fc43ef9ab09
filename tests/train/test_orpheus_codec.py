from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab.train import loop
from kvlab.train.orpheus import codec, quick

pytest.importorskip("snac", reason="needs the extra audio")

TINY: dict[str, Any] = {**codec.CONFIG, "encoder_dim": 2, "decoder_dim": 32, "codebook_size": 16}


@pytest.fixture(scope="module")
def sounds() -> list[torch.Tensor]:
    time = torch.arange(12_000) / codec.SAMPLE_RATE
    return [0.5 * torch.sin(2 * torch.pi * pitch * time) * (1 + torch.sin(9 * time)) / 2 for pitch in (200, 330, 470)]


def make_task(sounds: list[torch.Tensor], **changes: Any) -> codec.CodecTask:
    return codec.CodecTask(sounds, **{"num_steps": 20, "config": TINY, "unquantised_steps": 4, **changes})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_quick_layers_keep_names_sums_and_gradients() -> None:
    torch.manual_seed(0)
    theirs, ours = codec.build(TINY), codec.build(TINY)
    ours.load_state_dict(theirs.state_dict())
    quick.speed_up(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    sound = torch.randn(2, 1, 4096) * 0.3
    outs = []
    for net in (theirs, ours):
        torch.manual_seed(1)  # the noise of the decoder
        out, _ = net(sound)
        out.square().sum().backward()
        outs.append(out)
    assert torch.allclose(*outs, atol=1e-5)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4 * float(a.grad.abs().max())), name


def test_equal_sounds_have_no_mel_distance_and_a_wrong_pitch_has(sounds: list[torch.Tensor]) -> None:
    loss = codec.MelLoss()
    low, high = sounds[0][None], sounds[2][None]
    assert float(loss(low, low)) == 0.0
    assert float(loss(low, high)) > 0.3


def test_what_lies_below_the_floor_is_not_heard() -> None:
    loss = codec.MelLoss()
    assert float(loss(1e-6 * torch.randn(1, 8192), torch.zeros(1, 8192))) < 1e-2


def test_mel_distance_goes_down(sounds: list[torch.Tensor], tmp_path: Path) -> None:
    task = make_task(sounds, num_steps=12)
    torch.manual_seed(0)
    first = task.losses(0)["mel"].item()
    means = loop.train(task, tmp_path / "codec.pt", num_steps=12)
    assert means["mel"] < 0.9 * first


def test_a_killed_run_goes_on_to_the_same_state(sounds: list[torch.Tensor], tmp_path: Path) -> None:
    whole, killed = make_task(sounds), make_task(sounds)
    loop.train(whole, tmp_path / "whole.pt", num_steps=8)
    for step in range(6):  # past the code books
        torch.manual_seed(step)
        loop._set_lr(killed, loop.cosine(step, 8))
        loop._step(killed, step)
    loop.save(killed, tmp_path / "killed.pt", 6)
    resumed = make_task(sounds, seed=99)
    loop.train(resumed, tmp_path / "killed.pt", num_steps=8)
    assert same(whole.net.state_dict(), resumed.net.state_dict())
    assert same(whole.state(), resumed.state())


def test_a_finished_run_is_not_trained_again(sounds: list[torch.Tensor], tmp_path: Path) -> None:
    loop.train(make_task(sounds), tmp_path / "codec.pt", num_steps=2)
    again = make_task(sounds, seed=5)
    assert loop.train(again, tmp_path / "codec.pt", num_steps=2) == {}
    assert same(again.net.state_dict(), torch.load(tmp_path / "codec.pt", weights_only=True)["net"])


def test_a_decoder_trained_further_comes_closer_and_leaves_the_codes(sounds: list[torch.Tensor], tmp_path: Path) -> None:
    first = make_task(sounds)
    loop.train(first, tmp_path / "codec.pt", num_steps=5)
    before = [codec.encode(first.net, sound) for sound in sounds]
    task = codec.DecoderTask(first.net, sounds)
    torch.manual_seed(0)
    start = task.losses(0)["mel"].item()
    means = loop.train(task, tmp_path / "decoder.pt", num_steps=12)
    assert means["mel"] < 0.95 * start
    assert all(map(torch.equal, before, [codec.encode(first.net, sound) for sound in sounds]))


def test_codes_that_nothing_uses_become_latents_of_the_data(sounds: list[torch.Tensor]) -> None:
    task = make_task(sounds)
    for step in range(5):
        loop._step(task, step)
    task.uses[0][3] = 0.0
    task._restart(everything=False)
    book = task.net.quantizer.quantizers[0].codebook.weight
    assert (task.latents[0] - book[3]).norm(dim=1).min().item() < 0.05
    assert float(task.uses[0][3]) > 0


def test_a_recording_becomes_seven_codes_a_frame_in_order(sounds: list[torch.Tensor]) -> None:
    net = codec.build(TINY).eval()
    frames = codec.encode(net, sounds[0])
    coarse, middle, fine = net.encode(torch.nn.functional.pad(sounds[0], (0, 288))[None, None])
    assert frames.shape == (6, 7)
    assert frames[1].tolist() == [
        coarse[0, 1], middle[0, 2], fine[0, 4], fine[0, 5], middle[0, 3], fine[0, 6], fine[0, 7],
    ]  # fmt: skip


def test_levels_undo_the_order_of_the_seven(sounds: list[torch.Tensor]) -> None:
    net = codec.build(TINY).eval()
    padded = torch.nn.functional.pad(sounds[0], (0, 288))
    assert all(map(torch.equal, codec.levels(codec.encode(net, padded)[None]), net.encode(padded[None, None])))
