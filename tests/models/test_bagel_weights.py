"""A BAGEL folder: every name of the release has its place, and what is missing or too much is named."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import golden_bagel as golden
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.errors import LoadError, MissingExtraError
from kvlab.models.bagel import autoencoder as autoencoder_module
from kvlab.models.bagel.autoencoder import Autoencoder
from kvlab.models.bagel.config import AutoencoderConfig, BagelConfig, ResizeRule, SpecialIds, VisionConfig
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.weights import load_bagel, save_bagel, tensor_shapes
from kvlab.models.folders import is_bagel, part_files
from kvlab.models.textlm import TextConfig

pytest.importorskip("diffusers")

ODD_TENSOR = "language_model.model.layers.1.mlp_moe_gen.up_proj.weight"


def real_shapes(part: str) -> dict[str, tuple[int, ...]]:
    lines = [line.split("\t") for line in golden.table(f"real_{part}_tensors.tsv").splitlines() if not line.startswith("#")]
    return {name: tuple(ast.literal_eval(shape)) for name, shape in lines}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return golden.write_model(tmp_path / "bagel")


def change(file: Path, add: dict[str, torch.Tensor] | None = None, drop: tuple[str, ...] = ()) -> None:
    kept = {name: value for name, value in load_file(file).items() if name not in drop}
    save_file(kept | (add or {}), file)


# -- the release -------------------------------------------------------------------------------------------------------


def test_the_network_has_exactly_the_1223_tensors_of_the_release():
    expected = real_shapes("ema")
    with torch.device("meta"):
        net = BagelNet(BagelConfig())
    assert len(expected) == 1223
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == expected


def test_the_autoencoder_has_exactly_the_244_tensors_of_the_release():
    expected = real_shapes("ae")
    with torch.device("meta"):
        autoencoder = Autoencoder(AutoencoderConfig())
    assert len(expected) == 244
    assert {name: tuple(value.shape) for name, value in autoencoder.file_tensors()} == expected


def test_sizes_of_the_release_are_read_from_its_shapes():
    small = BagelConfig(autoencoder=AutoencoderConfig(8, (1, 1), 1, 4), max_latent_side=3)
    config = small.with_shapes(real_shapes("ema"))
    assert (config.max_latent_side, config.vision.side) == (64, 70)
    assert small.autoencoder.with_shapes(real_shapes("ae")) == AutoencoderConfig()


def test_bytes_of_a_picture_in_the_release_follow_from_its_config():
    text = BagelConfig().text
    slot_bytes = text.num_layers * 2 * text.num_kv_heads * text.head_dim * 2
    rows, columns = BagelConfig().latent_grid(1024, 1024)
    assert (slot_bytes, rows * columns, slot_bytes * rows * columns) == (57344, 4096, 224 << 20)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_folder_tells_its_sizes_ids_and_rules(folder: Path):
    net, autoencoder = load_bagel(folder)
    config = net.config
    assert (config.max_latent_side, config.vision.side, config.vision.num_layers) == (32, 10, 2)
    assert (config.latent_width, config.latent_stride, config.latent_grid(48, 64)) == (64, 16, (3, 4))
    assert config.special == SpecialIds(500, 501, 502, 503)
    assert (config.vae_rule, config.vit_rule) == (ResizeRule(64, 32, 16), ResizeRule(84, 28, 14))
    assert autoencoder.config == config.autoencoder == AutoencoderConfig(32, (1, 2, 1, 1), 1)


def test_nothing_records_gradients_unless_asked(folder: Path):
    net, autoencoder = load_bagel(folder)
    assert not any(p.requires_grad for module in (net, autoencoder) for p in module.parameters())


def test_a_bfloat16_network_keeps_a_float32_autoencoder(folder: Path):
    net, autoencoder = load_bagel(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in autoencoder.parameters()} == {torch.float32}
    case = golden.tensors("03_understanding")
    features = net.vit_model(case["vit_pixels"][None].bfloat16())[0].float()
    assert (features - case["vit_features"]).abs().max() < 0.1 * case["vit_features"].std()


def test_a_sharded_folder_loads_the_same_weights(folder: Path):
    whole, _ = load_bagel(folder)
    tensors = load_file(folder / "ema.safetensors")
    (folder / "ema.safetensors").unlink()
    names = sorted(tensors)
    shards = {"ema-1.safetensors": names[::2], "ema-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "ema.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    sharded, _ = load_bagel(folder)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), sharded.parameters(), strict=True))
    (folder / "ema-2.safetensors").unlink()
    with pytest.raises(LoadError, match=r"lacks the weight file ema-2\.safetensors"):
        load_bagel(folder)


def test_a_shard_outside_the_folder_is_refused(folder: Path):
    shutil.move(folder / "ae.safetensors", folder.parent / "ae.safetensors")
    index = {"weight_map": {"encoder.conv_in.bias": "../ae.safetensors"}}
    (folder / "ae.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(LoadError, match="lacks the weight file"):
        part_files(folder, "ae")


@pytest.mark.parametrize(
    ("file", "name"), [("ema.safetensors", ODD_TENSOR), ("ae.safetensors", "decoder.up.2.block.1.norm2.bias")]
)
def test_a_missing_tensor_is_named(folder: Path, file: str, name: str):
    change(folder / file, drop=(name,))
    with pytest.raises(LoadError, match=f"1 of .* tensors of the .* are missing: {name}"):
        load_bagel(folder)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors"])
def test_an_extra_tensor_is_named(folder: Path, file: str):
    change(folder / file, add={"language_model.model.layers.9.extra": torch.zeros(1)})
    with pytest.raises(LoadError, match=r"layers\.9\.extra.* has no place"):
        load_bagel(folder)


@pytest.mark.parametrize("groups", [0, 3])
def test_norm_groups_that_divide_no_level_are_named(groups: int):
    config = AutoencoderConfig(norm_groups=groups)
    with pytest.raises(LoadError, match=rf"128, 256, 512, 512 channels and norm_groups is {groups}.*config\.json"):
        config.with_shapes(real_shapes("ae"))


def test_a_tensor_of_another_shape_is_named(folder: Path):
    change(folder / "ema.safetensors", add={ODD_TENSOR: torch.zeros(3, 64)})
    with pytest.raises(LoadError, match=rf"{ODD_TENSOR}' has shape \[3, 64\] where \[128, 64\]"):
        load_bagel(folder)


def test_a_checkpoint_without_its_autoencoder_is_refused(folder: Path):
    (folder / "ae.safetensors").unlink()
    with pytest.raises(LoadError, match=r"neither ae\.safetensors nor .*the autoencoder's weights"):
        load_bagel(folder)


def test_a_damaged_file_is_named(folder: Path):
    (folder / "ema.safetensors").write_bytes((folder / "ema.safetensors").read_bytes()[:5000])
    with pytest.raises(LoadError, match=r"ema\.safetensors is not a whole"):
        load_bagel(folder)


def test_a_table_that_is_no_square_is_refused(folder: Path):
    change(folder / "ema.safetensors", add={"latent_pos_embed.pos_embed": torch.zeros(1000, 64)})
    with pytest.raises(LoadError, match="1000 rows, which are no square grid"):
        load_bagel(folder)


def test_the_release_may_ship_any_config_json(folder: Path):
    (folder / "config.json").write_text('{"model_type": "bagel",}', encoding="utf-8")
    assert BagelConfig.from_folder(folder).special == SpecialIds()


@pytest.mark.parametrize("entry", [{"special_ids": {"bso": 1}}, {"vae_transform": {"max_image_size": 64}}, [1]])
def test_a_wrong_entry_of_config_json_is_refused(folder: Path, entry):
    (folder / "config.json").write_text(json.dumps({"bagel": entry}), encoding="utf-8")
    with pytest.raises(LoadError, match='entry "bagel" of config.json'):
        BagelConfig.from_folder(folder)


def test_a_folder_is_told_by_its_decoders_config_and_the_vision_config_is_missed_by_name(folder: Path):
    (folder / "vit_config.json").unlink()
    assert is_bagel(folder)
    with pytest.raises(LoadError, match=r"vit_config\.json cannot be read"):
        BagelConfig.from_folder(folder)


def test_without_diffusers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models.autoencoders.autoencoder_kl", None)
    with pytest.raises(MissingExtraError, match=r'diffusers is needed .* pip install .*\[bagel\]"'):
        autoencoder_module.Autoencoder(AutoencoderConfig())


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_saved_folder_loads_as_it_was(folder: Path, tmp_path: Path):
    net, autoencoder = load_bagel(folder)
    save_bagel(tmp_path / "again", net, autoencoder)
    for part in ("ema", "ae"):
        file = f"{part}.safetensors"
        assert tensor_shapes([tmp_path / "again" / file]) == tensor_shapes([folder / file])
    again, autoencoder_again = load_bagel(tmp_path / "again")
    assert again.config == net.config
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    pairs = zip(autoencoder.parameters(), autoencoder_again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_small_networks_keep_other_sizes_through_their_files(tmp_path: Path):
    config = BagelConfig(
        text=TextConfig(64, 32, 48, 1, 4, 2, 8, 128, rope_theta=1e4, qkv_bias=True),
        vision=VisionConfig(24, 48, 1, 2, 14, 4),
        autoencoder=AutoencoderConfig(16, (1, 2, 4, 4), 1, norm_groups=8),
        max_latent_side=4,
        special=SpecialIds(1, 2, 3, 4),
        vae_rule=ResizeRule(64, 64, 16),
        vit_rule=ResizeRule(56, 56, 14),
    )
    net, autoencoder = BagelNet(config), Autoencoder(config.autoencoder)
    net.fill_tables()
    save_bagel(tmp_path / "small", net, autoencoder, dtype=torch.bfloat16)
    again, autoencoder_again = load_bagel(tmp_path / "small")
    assert again.config == config
    assert autoencoder_again.config == config.autoencoder
    assert (again.vae2llm.weight - net.vae2llm.weight).abs().max() < 0.01
