"""The codec: SNAC with its noise in our hands, and only as much of its decoder run as a few frames need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvlab.errors import InputError, LoadError, missing_extra
from kvlab.models.folders import read_json
from kvlab.models.orpheus.noise import NoiseSource, SeededNoise
from kvlab.models.orpheus.reach import Op, plan, reach_latents
from kvlab.models.orpheus.tokens import LEVELS, Frame, check_frames, from_levels, to_levels

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_LATENTS_PER_FRAME = len(LEVELS[-1])
_STRIDES = [_LATENTS_PER_FRAME // len(level) for level in LEVELS]


class Codec:
    """Frames to samples and back.

    Args:
        net: a ``snac.SNAC`` with its weights; it is changed (weight norms are folded into weights).

    Raises:
        LoadError: its code books do not make frames of seven tokens, or its decoder looks at unbounded stretches of sound.
    """

    latents_per_frame: ClassVar[int] = _LATENTS_PER_FRAME

    def __init__(self, net: Any) -> None:
        if list(net.vq_strides) != _STRIDES:
            raise LoadError(f"the codec's code books have strides {list(net.vq_strides)}; frames of 7 tokens need {_STRIDES}")
        if net.attn_window_size is not None:
            raise LoadError("the codec's decoder has an attention window; only convolutions can be decoded frame by frame")
        _fold_weight_norms(net.requires_grad_(False).eval())
        self.net = net
        self.sample_rate, self.codebook_size = int(net.sampling_rate), int(net.codebook_size)
        self._noise = SeededNoise(0)
        self.ops = list(_ops(net.decoder.model))
        self.hop_samples = math.prod(op.stride for op in self.ops)
        self.frame_samples = self.hop_samples * _LATENTS_PER_FRAME
        #: How many frames to either side a frame's samples depend on.
        self.reach_frames = math.ceil(reach_latents(self.ops) / _LATENTS_PER_FRAME)

    def __repr__(self) -> str:
        return (
            f"Codec({self.sample_rate} Hz, {self.frame_samples} samples a frame, {self.codebook_size} codes a book, "
            f"reach {self.reach_frames} frames)"
        )

    def decode(
        self,
        frames: Sequence[Sequence[int]],
        *,
        noise: NoiseSource | None = None,
        start_frame: int = 0,
        heard: range | None = None,
    ) -> Tensor:
        """Return the samples of frames, decoded in one go.

        Args:
            frames: Seven codes each.
            noise: Seed 0's when None.
            start_frame: Place of the first frame in its stream; the noise is that of this place.
            heard: Indices of the frames whose samples are wanted, the others being context; all when None.

        Raises:
            InputError: a frame has not seven codes, or a code is none.

        Shapes:
            result: [heard * frame_samples] float32 on the CPU.
        """
        checked = check_frames(frames, self.codebook_size)
        return self.decode_levels(to_levels(checked), noise=noise, start_frame=start_frame, heard=heard)

    @torch.inference_mode()
    def decode_levels(
        self,
        levels: Sequence[Sequence[int]],
        *,
        noise: NoiseSource | None = None,
        start_frame: int = 0,
        heard: range | None = None,
    ) -> Tensor:
        """Do the same with the code lists of the three levels, unchecked."""
        num_frames = len(levels[0])
        heard = range(num_frames) if heard is None else heard
        if not heard:
            return torch.zeros(0)
        ranges = plan(self.ops, _scaled(heard, self.frame_samples), num_frames * _LATENTS_PER_FRAME)
        codes = [torch.tensor([level], device=self._device) for level in levels]  # [1, codes]
        z = self.net.quantizer.from_codes(codes)[..., ranges[0].start : ranges[0].stop]  # [1, latent_dim, latents]
        return self._decoded(z, ranges, self._noise if noise is None else noise, start_frame * _LATENTS_PER_FRAME).cpu()

    def _decoded(self, x: Tensor, ranges: Sequence[range], noise: NoiseSource, start: int) -> Tensor:
        """Run the decoder; ``ranges`` are what each op reads and the last one writes, ``start`` is where these count from."""
        for op, have, wanted in zip(self.ops, ranges[:-1], ranges[1:], strict=True):
            if op.noise_stage is None:
                x = op.module(x)  # [1, channels, len(have) * op.stride]
            else:
                drawn = noise(op.noise_stage, start + have.start, len(have)).to(x)
                x = x + drawn * op.module.linear(x)
            x = _cut(x, _scaled(have, op.stride), wanted)  # [1, channels, len(wanted)]
            start *= op.stride
        return x[0, 0]

    @torch.inference_mode()
    def encode(self, samples: Any, sample_rate: int) -> list[Frame]:
        """Return the frames of a mono recording; the last one is padded with silence.

        Raises:
            InputError: another sample rate than the codec's, several channels, or samples that are not finite.
        """
        if sample_rate != self.sample_rate:
            raise InputError(
                f"the recording has {sample_rate!r} samples a second and the codec {self.sample_rate}; resample it first, "
                "for example with scipy.signal.resample_poly"
            )
        wave = check_wave(samples)
        codes = self.net.encode(wave.to(self._device)[None, None])
        return from_levels([level[0].tolist() for level in codes])

    def to(self, device: str | torch.device) -> Codec:
        """Move the weights."""
        self.net.to(device)
        return self

    @property
    def _device(self) -> torch.device:
        return next(self.net.parameters()).device


def check_wave(samples: Any) -> Tensor:
    """Return mono samples as float32, integers scaled to [-1, 1).

    Raises:
        InputError: not one channel, empty, or not finite.
    """
    wave = torch.as_tensor(samples)
    if wave.dim() != 1 or not len(wave):
        raise InputError(f"the recording has shape {list(wave.shape)}; give one channel of at least one sample")
    if not wave.is_floating_point():
        return wave.to(torch.float32) / 32768
    if not wave.isfinite().all():
        count = int((~wave.isfinite()).sum())
        raise InputError(f"{count} of {len(wave)} samples are NaN or infinite; look where the recording comes from")
    return wave.to(torch.float32)


def _scaled(places: range, factor: int) -> range:
    return range(places.start * factor, places.stop * factor)


def _cut(x: Tensor, have: range, wanted: range) -> Tensor:
    """Return the wanted part of [1, channels, len(have)]."""
    return x if have == wanted else x[..., wanted.start - have.start : wanted.stop - have.start]


def _ops(model: nn.Module) -> Iterator[Op]:
    """Yield the decoder's layers in order.

    Raises:
        LoadError: a layer whose reach is not known.
    """
    from snac import layers

    stages = itertools.count()
    pending = list(model.children())
    while pending:
        module = pending.pop(0)
        if isinstance(module, layers.DecoderBlock):
            pending[:0] = module.block.children()
        elif isinstance(module, layers.ResidualUnit):
            yield Op(module, reach=_conv_reach(module.block[1]))
        elif isinstance(module, layers.NoiseBlock):
            yield Op(module, noise_stage=next(stages))
        elif isinstance(module, nn.ConvTranspose1d):
            yield Op(module, stride=module.stride[0], padding=int(module.padding[0]))
        elif isinstance(module, nn.Conv1d):
            yield Op(module, reach=_conv_reach(module))
        elif isinstance(module, layers.Snake1d | nn.Tanh):
            yield Op(module)
        else:
            raise LoadError(f"the codec's decoder has a layer {type(module).__name__}, whose reach is not known")


def _conv_reach(conv: nn.Conv1d) -> int:
    return (conv.kernel_size[0] - 1) * conv.dilation[0] // 2


def _fold_weight_norms(net: nn.Module) -> None:
    from torch.nn.utils import parametrize

    for module in net.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


# -- from a folder -----------------------------------------------------------------------------------------------------


def load_codec(folder: Path, *, device: str | torch.device = "cpu") -> Codec:
    """Return the codec of a folder with config.json and model.safetensors or pytorch_model.bin.

    Weights in the torch format are read as tensors only, never as the programs that a pickle may hold.

    Raises:
        LoadError: files are missing, damaged, or do not fit together.
        MissingExtraError: ``snac`` is not installed.
    """
    try:
        from snac import SNAC
    except ImportError as e:
        raise missing_extra("snac", "audio", "to make sound of audio tokens") from e
    config = read_json(folder / "config.json")
    try:
        net = SNAC(**config)
    except TypeError as e:
        raise LoadError(f"{folder / 'config.json'} is no config of a SNAC codec ({e}); get it again") from e
    state = _read_state(codec_weights(folder))
    try:
        net.load_state_dict(state)
    except (RuntimeError, AttributeError) as e:
        raise LoadError(f"the weights in {folder} do not fit its config.json: {str(e).splitlines()[0]}; get both again") from e
    return Codec(net.float()).to(device)


def codec_weights(folder: Path) -> Path:
    """Return the weight file of a codec folder.

    Raises:
        LoadError: there is none.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise LoadError(f"{folder} has neither {' nor '.join(WEIGHTS)}; a codec folder needs one of them beside its config.json")


def _read_state(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except SafetensorError as e:
        raise LoadError(f"{path} ({path.stat().st_size:,} bytes) is not a whole safetensors file: {e}; get it again") from e
    except Exception as e:  # torch.load raises what its unpickler finds
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise LoadError(f"{path} is no plain file of tensors ({reason}); get it again, or give safetensors") from e
