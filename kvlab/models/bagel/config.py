"""What a BAGEL folder says about its network: three JSON files, and the shapes of the tensors where those decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any

from kvlab.errors import LoadError
from kvlab.models.folders import read_json
from kvlab.models.textlm import TextConfig

#: The entry of config.json that holds what the release keeps in its code and a smaller model changes.
ENTRY = "bagel"
LATENT_TABLE, VISION_TABLE = "latent_pos_embed.pos_embed", "vit_model.vision_model.embeddings.position_embedding.weight"


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower; ``num_layers`` are those that run, one less than vit_config.json names."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_layers: int = 26
    num_heads: int = 16
    patch_size: int = 14
    side: int = 70  # rows and columns of the table of positions, in patches
    layer_norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Read the content of a vit_config.json.

        Raises:
            LoadError: A field is missing or no positive whole number.
        """
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size")
        hidden, inner, layers, heads, patch, image = (_whole(config, name) for name in names)
        if layers < 2:
            raise LoadError(f"vit_config.json has num_hidden_layers {layers}; the last one is left out, so 2 are needed")
        if hidden % heads:
            raise LoadError(f"vit_config.json: hidden_size {hidden} is not shared evenly by {heads} heads")
        return cls(hidden, inner, layers - 1, heads, patch, image // patch, config.get("layer_norm_eps", 1e-6))

    def to_hf(self) -> dict[str, Any]:
        """Return the content of the vit_config.json that gives this."""
        return {
            "hidden_size": self.hidden_size,
            "image_size": self.side * self.patch_size,
            "intermediate_size": self.intermediate_size,
            "model_type": "siglip_vision_model",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers + 1,
            "patch_size": self.patch_size,
        }


@dataclass(frozen=True)
class AutoencoderConfig:
    """The autoencoder of pictures: level i has ``channels * multipliers[i]`` channels, and all but the last halve the sides."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    latent_channels: int = 16
    norm_groups: int = 32
    scale: float = 0.3611
    shift: float = 0.1159

    @property
    def downsample(self) -> int:
        """Pixels a side of one latent."""
        return int(2 ** (len(self.multipliers) - 1))

    def with_shapes(self, shapes: Mapping[str, Sequence[int]]) -> AutoencoderConfig:
        """Return this config with the sizes of the tensors in an ae.safetensors."""
        needed = ("encoder.conv_in.weight", "encoder.conv_out.weight", "encoder.down.0.block.0.conv2.weight")
        for name in needed:
            if name not in shapes:
                raise LoadError(
                    f"the autoencoder's tensor {name!r} is missing; ae.safetensors is incomplete or of another kind"
                )
        channels = shapes[needed[0]][0]
        levels = [shapes[name][0] for i in range(len(shapes)) if (name := f"encoder.down.{i}.block.0.conv2.weight") in shapes]
        blocks = sum(f"encoder.down.0.block.{i}.conv2.weight" in shapes for i in range(len(shapes)))
        if self.norm_groups < 1 or any(level % self.norm_groups for level in levels):
            raise LoadError(
                f"the autoencoder's levels have {', '.join(map(str, levels))} channels and norm_groups is {self.norm_groups}, "
                f'which must divide each; entry "{ENTRY}" of config.json says how many there are (32 without it): get it again'
            )
        multipliers = tuple(level // channels for level in levels)
        return replace(
            self,
            channels=channels,
            multipliers=multipliers,
            num_res_blocks=blocks,
            latent_channels=shapes[needed[1]][0] // 2,
        )


@dataclass(frozen=True)
class ResizeRule:
    """How large a picture may be, in pixels: sides are multiples of ``stride``, the long one at most ``max_side``."""

    max_side: int
    min_side: int
    stride: int
    max_pixels: int = 14 * 14 * 9 * 1024

    @classmethod
    def from_json(cls, fields: Mapping[str, int]) -> ResizeRule:
        """Read ``max_image_size``, ``min_image_size`` and ``image_stride``."""
        return cls(fields["max_image_size"], fields["min_image_size"], fields["image_stride"])

    def to_json(self) -> dict[str, int]:
        """Return the fields that ``from_json`` reads."""
        return {"max_image_size": self.max_side, "min_image_size": self.min_side, "image_stride": self.stride}


@dataclass(frozen=True)
class SpecialIds:
    """Ids that open and close a text and a picture."""

    bos: int = 151644
    eos: int = 151645
    start_of_image: int = 151652
    end_of_image: int = 151653


def release_text_config() -> TextConfig:
    """Return the decoder of BAGEL-7B-MoT."""
    return TextConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_seq_len=32768,
        rope_theta=1e6,
        qkv_bias=True,
    )


@dataclass(frozen=True)
class BagelConfig:
    """A BAGEL network; what is not said is as in BAGEL-7B-MoT."""

    text: TextConfig = field(default_factory=release_text_config)
    vision: VisionConfig = field(default_factory=VisionConfig)
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    latent_patch_size: int = 2
    max_latent_side: int = 64  # rows and columns of the table of positions, in latent patches
    special: SpecialIds = field(default_factory=SpecialIds)
    vae_rule: ResizeRule = ResizeRule(1024, 512, 16)
    vit_rule: ResizeRule = ResizeRule(980, 224, 14)

    @property
    def latent_width(self) -> int:
        """Values of one latent token."""
        return self.latent_patch_size**2 * self.autoencoder.latent_channels

    @property
    def latent_stride(self) -> int:
        """Pixels a side of one latent token."""
        return self.latent_patch_size * self.autoencoder.downsample

    def latent_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of latent tokens of a picture of so many pixels."""
        return height // self.latent_stride, width // self.latent_stride

    @classmethod
    def from_hf(cls, llm: Mapping[str, Any], vit: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> BagelConfig:
        """Read llm_config.json, vit_config.json and the entry "bagel" of config.json.

        Raises:
            LoadError: A field is missing, or asks for something this network does not do.
        """
        own = (config or {}).get(ENTRY) or {}
        base = cls(text=replace(TextConfig.from_hf(llm), tied=False), vision=VisionConfig.from_hf(vit))
        try:
            return replace(
                base,
                autoencoder=replace(base.autoencoder, **own.get("autoencoder", {})),
                special=replace(base.special, **own.get("special_ids", {})),
                vae_rule=ResizeRule.from_json(own["vae_transform"]) if "vae_transform" in own else base.vae_rule,
                vit_rule=ResizeRule.from_json(own["vit_transform"]) if "vit_transform" in own else base.vit_rule,
            )
        except (TypeError, KeyError, AttributeError) as e:
            raise LoadError(f'entry "{ENTRY}" of config.json is not as it should be ({e}); get it again') from e

    @classmethod
    def from_folder(cls, folder: Path) -> BagelConfig:
        """Read the JSON files of a checkpoint folder; sizes that only tensors tell are still the release's.

        The release's own config.json was no valid JSON in some versions and nothing in it is needed, so it may be anything.

        Raises:
            LoadError: llm_config.json or vit_config.json is missing or damaged.
        """
        try:
            config = read_json(folder / "config.json")
        except LoadError:
            config = {}
        try:
            return cls.from_hf(read_json(folder / "llm_config.json"), read_json(folder / "vit_config.json"), config)
        except LoadError as e:
            raise e if str(folder) in str(e) else LoadError(f"{folder}: {e}") from e

    def with_shapes(self, shapes: Mapping[str, Sequence[int]]) -> BagelConfig:
        """Return this config with the sizes of the tensors in an ema.safetensors that no JSON file tells.

        Raises:
            LoadError: A table of positions is missing or is no square grid.
        """
        return replace(
            self,
            max_latent_side=_side(LATENT_TABLE, shapes),
            vision=replace(self.vision, side=_side(VISION_TABLE, shapes)),
        )

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the JSON files of a folder with this network, by name."""
        autoencoder = self.autoencoder
        own = {
            "autoencoder": {name: getattr(autoencoder, name) for name in ("norm_groups", "scale", "shift")},
            "special_ids": asdict(self.special),
            "vae_transform": self.vae_rule.to_json(),
            "vit_transform": self.vit_rule.to_json(),
        }
        config = {
            "architectures": ["BagelForConditionalGeneration"],
            "model_type": "bagel",
            "vae_config": {"z_channels": autoencoder.latent_channels, "downsample": autoencoder.downsample},
            "latent_patch_size": self.latent_patch_size,
            "max_latent_size": self.max_latent_side,
            "vit_max_num_patch_per_side": self.vision.side,
            ENTRY: own,
        }
        return {"llm_config.json": _qwen2(self), "vit_config.json": self.vision.to_hf(), "config.json": config}


def _qwen2(config: BagelConfig) -> dict[str, Any]:
    text = config.text
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": config.special.bos,
        "eos_token_id": config.special.eos,
        "head_dim": text.head_dim,
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "max_position_embeddings": text.max_seq_len,
        "model_type": "qwen2",
        "num_attention_heads": text.num_heads,
        "num_hidden_layers": text.num_layers,
        "num_key_value_heads": text.num_kv_heads,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": text.vocab_size,
    }


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"vit_config.json: {name} is {value!r}; a positive whole number is needed")
    return value


def _side(name: str, shapes: Mapping[str, Sequence[int]]) -> int:
    rows = shapes[name][0] if name in shapes else 0
    side = isqrt(rows)
    if not rows or side * side != rows:
        raise LoadError(f"tensor {name!r} has {rows} rows, which are no square grid; the checkpoint is incomplete or damaged")
    return side
