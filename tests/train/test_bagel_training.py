from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.config import AutoencoderConfig
from kvlab.train import loop
from kvlab.train.bagel import autoencoder, flow, lessons, network, packing, pool, probe, scenes, vocabulary

pytest.importorskip("diffusers", reason="needs the extra bagel")

SMALL = AutoencoderConfig(channels=8, multipliers=(1, 1, 1, 1), num_res_blocks=1, latent_channels=16, norm_groups=4)
TEXT = replace(network.CONFIG.text, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, head_dim=16)
VISION = replace(network.CONFIG.vision, hidden_size=24, intermediate_size=32, num_layers=1, num_heads=2)
TINY = replace(network.CONFIG, text=TEXT, vision=VISION)
COUNTS = {"draw": 3, "edit": 3, "ask": 2, "chat": 1, "think": 1}


@pytest.fixture(scope="module")
def pictures() -> pool.Pool:
    torch.manual_seed(0)
    return pool.make(Autoencoder(SMALL).requires_grad_(False), 8, seed=0)


@pytest.fixture(scope="module")
def texts() -> vocabulary.Texts:
    return vocabulary.Texts(vocabulary.make_tokenizer())


def make_flow(pictures: pool.Pool, texts: vocabulary.Texts) -> flow.FlowTask:
    return flow.FlowTask(pictures, texts, config=TINY, counts=COUNTS)


def weights(task: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in task.net.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- autoencoder -------------------------------------------------------------------------------------------------------


def test_a_few_steps_bring_the_autoencoder_nearer(tmp_path: Path) -> None:
    task, unseen = autoencoder.AutoencoderTask(config=SMALL, batch=2), autoencoder.pictures(4, random.Random(1))
    before = autoencoder.signal_to_noise_db(task.autoencoder, unseen)
    loop.train(task, tmp_path / "a.pt", num_steps=12)
    assert autoencoder.signal_to_noise_db(task.autoencoder, unseen) > before + 0.5


def test_evened_latents_have_one_scale() -> None:
    torch.manual_seed(0)
    net, some = Autoencoder(SMALL).requires_grad_(False), autoencoder.pictures(16, random.Random(0))
    autoencoder.even_out(net, some)
    latents = net.encode(some, torch.randn(16, 16, 8, 8))
    assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(16), atol=0.1)
    assert torch.allclose(latents.std((0, 2, 3)), torch.ones(16), atol=0.1)


def test_evening_out_changes_nothing_for_the_decoder_but_at_the_border() -> None:
    torch.manual_seed(0)
    net, some = Autoencoder(SMALL).requires_grad_(False), autoencoder.pictures(4, random.Random(0))

    def first() -> torch.Tensor:
        read: torch.Tensor = net.net.decoder.conv_in(net.moments(some)[0])
        return read[..., 1:-1, 1:-1]

    before = first()
    autoencoder.even_out(net, some)
    assert torch.allclose(first(), before, atol=1e-4)


def test_the_second_stage_trains_the_decoder_alone(tmp_path: Path) -> None:
    net = Autoencoder(SMALL)
    first, last = (half.conv_in.weight.detach().clone() for half in (net.net.encoder, net.net.decoder))
    loop.train(autoencoder.DecoderTask(net, batch=2), tmp_path / "d.pt", num_steps=2)
    assert torch.equal(net.net.encoder.conv_in.weight, first)
    assert not torch.equal(net.net.decoder.conv_in.weight, last)


# -- pool and lessons --------------------------------------------------------------------------------------------------


def test_a_kept_pool_is_the_one_that_was_made(pictures: pool.Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Autoencoder(SMALL).requires_grad_(False)
    for _ in range(2):
        kept = pool.kept(tmp_path / "latents.pt", net, 8, seed=0)
        assert torch.equal(kept.pixels, pictures.pixels)
        assert torch.equal(kept.mean, pictures.mean)
        assert kept.edits == pictures.edits


def test_the_picture_to_draw_is_the_one_that_the_text_tells(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    teacher = lessons.Teacher(pictures, texts)
    asked = teacher.lessons("draw", 40, random.Random(0))
    told = [parts for parts in asked if len(parts) == 2]
    assert 0 < len(told) < 40  # the rest learn to draw without a text
    for text, made in told:
        scene = pictures.scene(made.picture)
        assert texts.words(text.ids[1:-1]) in lessons.scenes.captions(scene)


def test_an_edit_leads_from_its_source_to_its_target(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    orders = set()
    for parts in lessons.Teacher(pictures, texts).lessons("edit", 80, random.Random(0)):
        made = parts[-1].picture
        assert {part.picture for part in parts if part.kind in ("vae", "vit")} <= {made - 1}
        assert all(texts.words(p.ids[1:-1]) == pictures.edits[made // 2].text for p in parts if p.kind == "text")
        orders.add(tuple(part.kind for part in parts[:-1]))
    assert orders == {("vae", "vit", "text"), ("text", "vae", "vit"), ("vae", "vit"), ("text",)}


def test_only_answers_and_plans_are_learned_as_words(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    teacher, draw = lessons.Teacher(pictures, texts), random.Random(0)
    learned = {
        kind: [part.is_answer for part in teacher.lessons(kind, 1, draw)[0]] for kind in ("draw", "edit", "ask", "think")
    }
    assert not any(learned["draw"] + learned["edit"])
    assert learned["ask"] == [False, False, True]
    assert learned["think"] == [False, False, True, False]
    chat = teacher.lessons("chat", 1, draw)[0]
    assert [part.is_answer for part in chat] == [False, True] * (len(chat) // 2)


# -- flow --------------------------------------------------------------------------------------------------------------


def test_every_kind_has_its_term_and_an_untrained_velocity_its_known_error(
    pictures: pool.Pool, texts: vocabulary.Texts
) -> None:
    torch.manual_seed(0)
    terms = make_flow(pictures, texts).losses(0)
    assert list(terms) == ["draw", "edit", "words", "patches"]
    # velocities start at zero, and noise minus latents of unit scale has a mean square of two
    some = pictures.latents(torch.arange(16)).square().mean().item()
    assert terms["draw"].item() == pytest.approx(1 + some, rel=0.3)


def test_a_few_steps_lower_every_term(pictures: pool.Pool, texts: vocabulary.Texts, tmp_path: Path) -> None:
    task = make_flow(pictures, texts)
    torch.manual_seed(1)
    before = {name: value.item() for name, value in task.losses(0).items()}
    loop.train(task, tmp_path / "f.pt", num_steps=30, schedule=flow.flat_then_cosine)
    torch.manual_seed(1)
    after = {name: value.item() for name, value in task.losses(0).items()}
    assert all(after[name] < before[name] for name in before)


def test_a_killed_run_ends_as_one_that_was_not(pictures: pool.Pool, texts: vocabulary.Texts, tmp_path: Path) -> None:
    through = make_flow(pictures, texts)
    loop.train(through, tmp_path / "through.pt", num_steps=4, save_every_s=0)

    class Killed(Exception):
        pass

    def die(step_index: int) -> None:
        if step_index == 2:
            raise Killed
        flow.FlowTask.after(killed, step_index)

    killed = make_flow(pictures, texts)
    killed.after = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        loop.train(killed, tmp_path / "killed.pt", num_steps=4, save_every_s=0)
    again = make_flow(pictures, texts)
    loop.train(again, tmp_path / "killed.pt", num_steps=4)
    assert same(weights(again), weights(through))
    assert same([p.detach() for p in again.ema.parameters()], [p.detach() for p in through.ema.parameters()])


def test_the_average_follows_the_weights(pictures: pool.Pool, texts: vocabulary.Texts, tmp_path: Path) -> None:
    task = make_flow(pictures, texts)
    start = weights(task)
    loop.train(task, tmp_path / "f.pt", num_steps=3)
    for old, new, kept in zip(start, task.net.parameters(), task.ema.parameters(), strict=True):
        if not torch.equal(old, new):
            assert (kept - new).norm() < (old - new).norm()


def test_patches_are_labelled_by_the_shape_on_them() -> None:
    scene = scenes.Scene("row", (scenes.Thing("red", "square"), scenes.Thing("blue", "cross")), "white")
    labels = probe.shapes_of_patches(scenes.Drawing(scene, ((17, 32, 13), (47, 32, 13))), 5).reshape(5, 5)
    square, cross = (scenes.SHAPES.index(shape) + 1 for shape in ("square", "cross"))
    assert labels[2, [0, 1, 3, 4]].tolist() == [square, square, cross, cross]
    assert not labels[[0, 4]].any()


def test_the_probe_teaches_the_vision_tower(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    task = make_flow(pictures, texts)
    torch.manual_seed(0)
    task.losses(0)["patches"].backward()
    tower = [p.grad for p in task.net.vit_model.vision_model.embeddings.patch_embedding.parameters()]
    assert all(grad is not None and grad.any() for grad in tower)
    assert task.net.language_model.lm_head.weight.grad is None


def test_tokens_that_an_edit_changes_count_more(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    task = make_flow(pictures, texts)
    made = torch.arange(1, 16, 2)
    change = (pictures.mean[made].float() - pictures.mean[made - 1].float()).square().mean(-1)
    weights_of = task._importance(made)
    assert weights_of.mean().item() == pytest.approx(1, abs=1e-5)
    assert weights_of.flatten()[change.argmax()] > weights_of.flatten()[change.argmin()]


def test_the_schedule_rises_stays_and_falls_to_nothing() -> None:
    shares = [flow.flat_then_cosine(i, 1000) for i in (0, 99, 399, 700, 999)]
    assert shares == pytest.approx([0.01, 1, 1, 0.5, 0], abs=0.01)


def test_packing_puts_every_group_of_a_step_in_one_forward(pictures: pool.Pool, texts: vocabulary.Texts) -> None:
    kinds = {kind for group in lessons.GROUPS for kind in group}
    assert kinds == set(lessons.COUNTS)
    teacher = lessons.Teacher(pictures, texts)
    groups = [teacher.lessons(kind, 2, random.Random(0)) for kind in lessons.COUNTS]
    packed = packing.pack(groups, num_latents=network.NUM_LATENTS, num_patches=network.NUM_PATCHES)
    assert sum(mask.shape[0] * mask.shape[1] for mask in packed.masks) == len(packed.ids) == len(packed.positions)
