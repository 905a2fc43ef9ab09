"""BAGEL's modules against numbers of the released code, each alone and as whole requests through pages."""

from __future__ import annotations

import json

import golden_bagel as golden
import pytest
import torch
from golden_bagel import HandRun, assert_near
from torch import Tensor

from kvlab.models.bagel.attending import ContiguousAttention, ContiguousRow, MaskedAttention
from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8, to_uint8
from kvlab.models.bagel.flow import guide, timesteps
from kvlab.models.bagel.mot import Experts
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.patches import grid_positions, patchify, sincos_table, unpatchify
from kvlab.models.bagel.weights import load_bagel

pytest.importorskip("diffusers")

GRID = (3, 4)
DRAWINGS = golden.names("05") + golden.names("06") + golden.names("07") + golden.names("08")
WITH_BRANCHES = ["05_t2i_global_0_1", "06_edit_textchannel_0_1", "08_text_image_text"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[BagelNet, Autoencoder]:
    return load_bagel(golden.write_model(tmp_path_factory.mktemp("bagel") / "model"))


@pytest.fixture(scope="module")
def net(loaded) -> BagelNet:
    return loaded[0]


@pytest.fixture(scope="module")
def autoencoder(loaded) -> Autoencoder:
    return loaded[1]


def assert_kv_near(run: HandRun, label: str, expected: dict[str, Tensor], prefix: str = "", start: int = 0) -> None:
    for layer in range(run.store.layout.num_layers):
        for name, ours in zip("kv", run.kv(label, layer), strict=True):
            assert_near(ours[start:], expected[f"{prefix}{name}.{layer}"], f"{label} {prefix}{name}.{layer}")


# -- single modules ----------------------------------------------------------------------------------------------------


def test_embedding(net):
    case = golden.tensors("01_text_prefill")
    assert torch.equal(net.embed_text(case["turn1_ids"]), case["turn1_embed"])


@pytest.mark.parametrize("layer", range(3))
def test_a_single_layer(net, layer):
    case = golden.tensors("01_text_prefill")
    outs = case["turn1_layer_out"]
    x = outs[layer - 1] if layer else case["turn1_embed"]
    model = net.language_model.model
    causal = MaskedAttention(torch.ones(12, 12, dtype=torch.bool).tril())
    assert_near(model.layers[layer](x, model.rotary(torch.arange(12), x.dtype), Experts(), causal), outs[layer])


@pytest.mark.parametrize(("table", "side"), [("vit_pos_embed", 10), ("latent_pos_embed", 32)])
def test_fixed_tables_are_the_formula(net, table, side):
    assert torch.equal(getattr(net, table).pos_embed, sincos_table(side, 64))


def test_vision_tower(net):
    case = golden.tensors("03_understanding")
    assert_near(net.vit_model(case["vit_pixels"][None])[0], case["vit_features"])


def test_connector(net):
    case = golden.tensors("03_understanding")
    assert_near(net.connector(case["vit_features"]), case["connector_out"])


def test_picture_embeddings_between_markers(net):
    case = golden.tensors("03_understanding")
    assert_near(net.between_markers(net.embed_picture(case["vit_pixels"])), case["image_query"])


def test_picture_positions(net):
    case = golden.tensors("03_understanding")
    assert torch.equal(grid_positions((3, 5), net.config.vision.side), case["vit_position_ids"])
    table = json.loads(golden.table("position_ids.json"))
    assert grid_positions((3, 5), 70).tolist() == table["vit_70_extrapolate_hw_42_70"]
    assert grid_positions(GRID, 64).tolist() == table["latent_64_extrapolate_hw_48_64"]


def test_latent_positions(net):
    positions = golden.tensors("04_vae")["latent_position_ids"]
    assert torch.equal(grid_positions(GRID, net.config.max_latent_side), positions)


def test_autoencoder_encodes(autoencoder):
    case = golden.tensors("04_vae")
    pixels = from_uint8(case["resized_u8"])[None]
    mean, log_variance = autoencoder.moments(pixels)
    assert_near(mean, case["mean"])
    assert_near(log_variance, case["logvar"])
    assert_near(autoencoder.encode(pixels, case["noise"]), case["latent"])
    assert_near(autoencoder.encode(pixels), 0.3611 * (case["mean"] - 0.1159))


def test_autoencoder_decodes(autoencoder):
    case = golden.tensors("04_vae")
    assert_near(autoencoder.decode(case["latent"]), case["reconstruction"])


def test_latents_are_cut_into_tokens_and_put_together():
    case = golden.tensors("04_vae")
    assert torch.equal(patchify(case["latent"][0], 2), case["packed_latent"])
    assert torch.equal(unpatchify(case["packed_latent"], GRID, 2), case["latent"][0])


def test_time_embedding(net):
    assert_near(net.time_embedder(torch.zeros(1)), golden.tensors("04_vae")["time_embed_0"])


def test_latent_embeddings_between_markers(net):
    case = golden.tensors("04_vae")
    assert_near(net.between_markers(net.embed_latents(case["packed_latent"], GRID, 0.0)), case["image_query"])


@pytest.mark.parametrize("schedule", json.loads(golden.table("timesteps.json")))
def test_times_of_a_drawing(schedule):
    num_timesteps, shift = schedule.split(",")
    expected = json.loads(golden.table("timesteps.json"))[schedule]
    assert timesteps(int(num_timesteps), float(shift))[:-1].tolist() == expected


@pytest.mark.parametrize("case", WITH_BRANCHES)
def test_guidance_of_given_velocities(case):
    given = golden.tensors(case)
    for i, expected in enumerate(given["v_t"]):
        parts = [given[f"branch_{name}"][i, 1:-1] for name in ("cond", "cfg_text", "cfg_img")]
        assert_near(guide(*parts, golden.guidance(case)), expected)


# -- walks through pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [4, 16, 128])
def test_01_two_texts(net, page_size):
    case, run = golden.tensors("01_text_prefill"), HandRun(net, page_size)
    for turn in ("turn1", "turn2"):
        hidden = run.text(case[f"{turn}_ids"][1:-1].tolist())
        assert_near(hidden, case[f"{turn}_hidden"])
        assert_near(net.logits(hidden), case[f"{turn}_logits"])
    assert_kv_near(run, "main", case, "turn2_")


def test_02_decode(net):
    first, case, run = golden.tensors("01_text_prefill"), golden.tensors("02_text_decode"), HandRun(net)
    for turn in ("turn1", "turn2"):
        run.text(first[f"{turn}_ids"][1:-1].tolist())
    ids, hidden = run.decode(13)
    assert ids == case["sampled_ids"].tolist()
    assert_near(torch.cat(hidden), case["hidden"])
    assert_near(net.logits(torch.cat(hidden)), case["logits"])
    assert_kv_near(run, "main", case)


def test_03_understanding(net):
    case, run = golden.tensors("03_understanding"), HandRun(net)
    assert_near(run.seen(case["vit_pixels"]), case["image_hidden"])
    assert_near(run.text(golden.facts("03_understanding")["text_ids"][1:-1]), case["text_hidden"])
    assert_kv_near(run, "main", case)
    ids, hidden = run.decode(len(case["decode_hidden"]))
    assert ids[:6] == golden.ids_of(golden.facts("03_understanding")["output_string"])
    assert_near(torch.cat(hidden), case["decode_hidden"])
    assert_near(net.logits(torch.cat(hidden)), case["decode_logits"])


def test_04_a_picture_as_context(net, autoencoder):
    case, run = golden.tensors("04_vae"), HandRun(net)
    assert_near(run.encoded(from_uint8(case["resized_u8"]), case["noise"], autoencoder), case["image_hidden"])
    assert_kv_near(run, "main", case)
    assert run.positions == {"main": 1}


@pytest.mark.parametrize("case", DRAWINGS)
def test_drawing(net, autoencoder, case):
    expected = golden.tensors(case)
    run = golden.run_context(HandRun(net), case, autoencoder)
    for label, prefix in (("main", "ctx_main_"), ("cfg_img", "ctx_img_")):
        if f"{prefix}k.0" in expected:
            assert_kv_near(run, label, expected, prefix)
    velocities, latents = run.draw(golden.start_noise(case), GRID, case)
    assert_near(torch.stack(velocities), expected["v_t"])
    assert_near(latents, expected["final_latent_tokens"])
    pixels = autoencoder.decode(unpatchify(latents, GRID, 2)[None])
    if "decoded" in expected:
        assert_near(pixels, expected["decoded"])
    assert (to_uint8(pixels[0]).int() - expected["image_u8"].int()).abs().max() <= 1


@pytest.mark.parametrize("case", WITH_BRANCHES)
def test_velocities_of_each_context(net, autoencoder, case):
    expected = golden.tensors(case)
    run = golden.run_context(HandRun(net, page_size=16), case, autoencoder)
    contexts = golden.facts(case)["contexts"]
    assert {label: run._reads(label)[1:] for label in contexts} == {
        label: (context["rows"], context["ropes"][0]) for label, context in contexts.items()
    }
    parts = run.branches(golden.start_noise(case), GRID, torch.tensor(1.0), ("main", "cfg_text", "cfg_img"))
    for part, name in zip(parts, ("cond", "cfg_text", "cfg_img"), strict=True):
        assert_near(part, expected[f"branch_{name}"][0], name)


def test_07_thinking(net):
    case, run = "07_think_t2i", HandRun(net)
    system, _, prompt, _, thinking = (call["ids"] for call in golden.facts(case)["tokenizer_calls"])
    run.text(system)
    run.text(prompt)
    assert run.decode(len(thinking))[0] == thinking


@pytest.mark.parametrize(("request_index", "rows"), [(0, slice(0, 37)), (1, slice(37, 67))])
def test_09_texts_then_a_picture(net, request_index, rows):
    case, run = golden.tensors("09_packed_two_requests"), HandRun(net)
    for text in golden.facts("09_packed_two_requests")["texts"][request_index]:
        run.text(golden.ids_of(text))
    size = [(42, 70), (70, 28)][request_index]
    pixels = from_uint8(golden.resize(case[f"image{request_index}_u8"], *size))
    features = case["vit_features"].split([15, 10])[request_index]
    assert_near(net.vit_model(pixels[None])[0], features)
    run.seen(pixels)
    assert_kv_near(run, "main", {name: value[rows] for name, value in case.items()})
    assert run.positions["main"] == golden.facts("09_packed_two_requests")["ropes_after"][request_index]


# -- without pages -----------------------------------------------------------------------------------------------------


def test_plain_memory_draws_what_pages_draw(net):
    case = golden.tensors("05_t2i_nocfg")
    attention = ContiguousAttention(net.config.text, capacity=40)
    ids = [500, *golden.ids_of(golden.facts("05_t2i_nocfg")["inputs"][0]), 501]
    attention.begin([ContiguousRow("main", 10)])
    net.decode(net.embed_text(ids), torch.arange(10), attention)
    attention.finish()
    run = HandRun(net)
    run.text(ids[1:-1])
    noise, t = golden.start_noise("05_t2i_nocfg"), torch.tensor(1.0)
    x = net.between_markers(net.embed_latents(noise, GRID, t))
    attention.begin([ContiguousRow("main", 14)], causal=False, commit=False)
    mask = torch.tensor([False] + [True] * 12 + [False])
    velocity = net.velocity(net.decode(x, torch.full((14,), 10), attention, is_gen=mask))
    attention.finish()
    assert attention.length("main") == 10
    assert_near(velocity[1:-1], case["v_t"][0])
    assert_near(velocity, run.branches(noise, GRID, t, ("main",))[0])
