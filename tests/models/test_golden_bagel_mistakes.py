"""The right values notice the mistakes that ports of this model have made: each is planted, and a case must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched_bagel import Watched, check, copied, load_watched_model

from kvlab.models.bagel import latents, plan, spec
from kvlab.models.bagel.patches import patchify, unpatchify
from kvlab.models.bagel.spec import BagelModel
from kvlab.models.layers import RotaryEmbedding
from kvlab.spec import Prefix

pytest.importorskip("diffusers")
pytest.importorskip("PIL")
pytestmark = pytest.mark.slow

Plant = Callable[[BagelModel, pytest.MonkeyPatch], None]
MISTAKES: dict[str, tuple[str, Plant]] = {}


def mistake(case: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        MISTAKES[plant.__name__] = (case, plant)
        return plant

    return register


def layers(model: BagelModel) -> list[Any]:
    return list(model.net.language_model.model.layers)


def spoil(monkeypatch: pytest.MonkeyPatch, model: BagelModel, name: str, change: Callable[..., Any]) -> None:
    """Let ``change`` work on what goes into a method and call it."""
    original = getattr(model, name)
    monkeypatch.setattr(model, name, lambda *args: change(original, *args))


@mistake("03_understanding")
def rope_counts_inside_image(model, monkeypatch):
    def forward(original, walk, rows, attention):
        def counted(row):
            start = row.positions[0]
            return row if row.block is None else replace(row, positions=range(start, start + len(row.positions)))

        return original(walk, [counted(row) for row in rows], attention)

    spoil(monkeypatch, model, "forward", forward)


@mistake("04_vae")
def image_block_causal(model, monkeypatch):
    walks = {name: replace(walk, causal=True) for name, walk in model.walks().items()}
    monkeypatch.setattr(model, "walks", lambda: walks)


@mistake("04_vae")
def markers_use_gen_expert(model, monkeypatch):
    monkeypatch.setattr(spec, "gen_mask", lambda tokens: torch.ones(tokens + 2, dtype=torch.bool))


@mistake("03_understanding")
def no_vit_post_layernorm(model, monkeypatch):
    model.net.vit_model.vision_model.post_layernorm = nn.Identity()


@mistake("03_understanding")
def vit_patch_weight_cpq(model, monkeypatch):
    weight = model.net.vit_model.vision_model.embeddings.patch_embedding.weight
    weight.data = weight.data.unflatten(1, (3, 14, 14)).permute(0, 2, 3, 1).flatten(1).contiguous()


@mistake("05_t2i_nocfg")
def latent_patch_order_cpq(model, monkeypatch):
    def to_channels_first(tokens: Tensor, back: bool) -> Tensor:
        shape = (16, 2, 2) if back else (2, 2, 16)
        return tokens.unflatten(-1, shape).permute(0, *((2, 3, 1) if back else (3, 1, 2))).flatten(1)

    monkeypatch.setattr(spec, "patchify", lambda x, size: to_channels_first(patchify(x, size), back=False))
    monkeypatch.setattr(spec, "unpatchify", lambda x, grid, size: unpatchify(to_channels_first(x, back=True), grid, size))


@mistake("03_understanding")
def no_vit_pos_embed(model, monkeypatch):
    model.net.vit_pos_embed.pos_embed.data.zero_()


@mistake("05_t2i_nocfg")
def no_latent_pos_embed(model, monkeypatch):
    model.net.latent_pos_embed.pos_embed.data.zero_()


@mistake("01_text_prefill")
def rope_theta_1e4(model, monkeypatch):
    model.net.language_model.model.rotary = RotaryEmbedding(16, 1e4, None)


@mistake("05_t2i_nocfg")
def timestep_sin_cos_swapped(model, monkeypatch):
    waves = latents.time_waves
    monkeypatch.setattr(latents, "time_waves", lambda t: waves(t).roll(latents.NUM_FREQUENCIES, -1))


def _use_und(model: BagelModel, *names: str) -> None:
    for layer in layers(model):
        for name in names:
            target = layer.get_submodule(f"{name}_moe_gen")
            target.load_state_dict(layer.get_submodule(name).state_dict())


@mistake("05_t2i_nocfg")
def gen_uses_und_qk_norm(model, monkeypatch):
    _use_und(model, "self_attn.q_norm", "self_attn.k_norm")


@mistake("05_t2i_nocfg")
def gen_uses_und_final_norm(model, monkeypatch):
    decoder = model.net.language_model.model
    decoder.norm_moe_gen.load_state_dict(decoder.norm.state_dict())


@mistake("05_t2i_nocfg")
def gen_uses_und_mlp(model, monkeypatch):
    for layer in layers(model):
        layer.mlp_moe_gen = layer.mlp


@mistake("01_text_prefill")
def rms_eps_1e_5(model, monkeypatch):
    from kvlab.models.layers import RMSNorm

    for module in model.net.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-5


@mistake("03_understanding")
def vit_exact_gelu(model, monkeypatch):
    for layer in model.net.vit_model.vision_model.encoder.layers:
        layer.mlp.activation_fn = nn.GELU()


@mistake("04_vae")
def groupnorm_eps_1e_5(model, monkeypatch):
    for module in model.autoencoder.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 1e-5


@mistake("06_edit_textchannel_0_1")
def edit_cfg_text_empty(model, monkeypatch):
    monkeypatch.setattr(plan.Plan, "without_latest_text", lambda self: Prefix("main", 0, 0))


@mistake("03_understanding")
def sincos_h_first(model, monkeypatch):
    table = model.net.vit_pos_embed.pos_embed
    table.data = table.data.roll(table.shape[1] // 2, 1)


@mistake("04_vae")
def vae_no_shift(model, monkeypatch):
    model.autoencoder.config = replace(model.autoencoder.config, shift=0.0)


@mistake("02_text_decode")
def decode_starts_without_bos(model, monkeypatch):
    walks = {name: replace(walk, starts_with=walk.starts_with and 501) for name, walk in model.walks().items()}
    monkeypatch.setattr(model, "walks", lambda: walks)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> BagelModel:
    return load_watched_model(tmp_path_factory.mktemp("bagel") / "model")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(model, monkeypatch, name):
    case, plant = MISTAKES[name]
    with Watched(copied(model)) as watched:
        check(watched, case)  # right before, and the copy is not what is noticed
    spoiled = copied(model)
    plant(spoiled, monkeypatch)
    with Watched(spoiled) as watched, pytest.raises(AssertionError):
        check(watched, case)
