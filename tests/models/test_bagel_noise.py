"""The noise of pictures and the names of what encoders make of them."""

from __future__ import annotations

from dataclasses import replace

import golden_bagel as golden
import pytest
import torch
from watched_bagel import WordTokenizer, picture

import kvlab
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.noise import START, VAE, normal
from kvlab.models.bagel.prompting import BagelProcessor

pytest.importorskip("PIL")

SHOWN, TEXT = picture(), "17 233 404"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> BagelConfig:
    return BagelConfig.from_folder(golden.write_model(tmp_path_factory.mktemp("bagel") / "model"))


@pytest.fixture(scope="module")
def processor(config) -> BagelProcessor:
    return BagelProcessor(WordTokenizer(), config)


def plan(processor, prompt, seed=1):
    return processor.process_prompt(prompt, {"seed": seed}).metadata["plan"]


def digests(processor, prompt, seed=1):
    return [p.digest for p in plan(processor, prompt, seed).passes if hasattr(p, "digest")]


def test_k18_5_noise_depends_on_the_seed_the_purpose_and_the_number_alone():
    torch.manual_seed(0)
    first = normal(7, START, 0, (12, 64))
    torch.randn(5)
    assert torch.equal(first, normal(7, START, 0, (12, 64)))
    others = [normal(1, START, 0, (12, 64)), normal(7, VAE, 0, (12, 64)), normal(7, START, 1, (12, 64))]
    others.append(normal(7 + 2**32, START, 0, (12, 64)))
    assert not any(torch.equal(first, other) for other in others)
    assert abs(float(first.mean())) < 0.1
    assert abs(float(first.std()) - 1) < 0.1


def test_k18_7_a_sampled_encoding_is_named_by_its_noise(processor):
    def latents(seed, **settings):
        return digests(processor, kvlab.draw(SHOWN, TEXT, **settings), seed)[0]

    assert latents(1) == latents(1) != latents(2)
    assert latents(1, vae_sample="mean") == latents(2, vae_sample="mean") != latents(1)
    given = [torch.zeros(16, 6, 8)]
    assert latents(1, vae_noise=given) == latents(2, vae_noise=given) != latents(1)
    assert latents(None) != latents(None)


def test_k18_7_what_the_vision_tower_sees_has_no_noise(processor):
    def patches(prompt, seed):
        return digests(processor, prompt, seed)[-1]

    assert patches(kvlab.draw(SHOWN, TEXT), 1) == patches(kvlab.draw(SHOWN, TEXT), 2) == patches(kvlab.ask(SHOWN, TEXT), None)


def test_pictures_are_numbered_in_the_order_written(processor):
    both = digests(processor, kvlab.draw(SHOWN, SHOWN, TEXT))
    assert both[0] != both[2]
    assert both[1] == both[3]
    assert plan(processor, kvlab.draw(SHOWN, SHOWN, TEXT)).start.number == 2


def test_other_rules_for_sizes_are_another_picture(processor, config):
    other = BagelProcessor(WordTokenizer(), replace(config, vit_rule=replace(config.vit_rule, max_side=70)))
    assert digests(other, kvlab.ask(SHOWN)) != digests(processor, kvlab.ask(SHOWN))
    assert other.fingerprint() != processor.fingerprint()
