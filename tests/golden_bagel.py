"""The right values for BAGEL, and a request run walk by walk through pages with tables written by hand."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from kvlab.attention.store import KVStore
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.models.bagel.attending import through_pages
from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8
from kvlab.models.bagel.flow import Guidance, euler_step, guide, timesteps
from kvlab.models.bagel.network import BagelNet, gen_mask
from kvlab.models.bagel.patches import patchify
from kvlab.spec import KVLayout, StepRow, StepTables

ARCHIVE = Path(__file__).parent / "golden" / "bagel" / "vectors.tar.xz"
#: Of a tensor's standard deviation; the released code itself moves by 1.2e-5 in float64.
TOLERANCE = 2.5e-5
NOISE_OF = {"05": "05_t2i_global_0_1", "06": "06_edit_textchannel_0_1"}


@cache
def _archive() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def names(start: str = "") -> list[str]:
    """Return the names of the cases that start so."""
    found = (name.removeprefix("cases/").removesuffix(".json") for name in _archive() if name.startswith(f"cases/{start}"))
    return sorted(name for name in found if "." not in name)


def tensors(case: str) -> dict[str, Tensor]:
    return load(_archive()[f"cases/{case}.safetensors"])


def facts(case: str) -> dict[str, Any]:
    return json.loads(_archive()[f"cases/{case}.json"])


def table(name: str) -> str:
    return _archive()[f"tables/{name}"].decode()


def start_noise(case: str) -> Tensor:
    return tensors(NOISE_OF.get(case[:2], case))["init_noise"]


def write_model(folder: Path) -> Path:
    """Write the tiny checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _archive().items():
        if name.startswith("model/"):
            (folder / Path(name).name).write_bytes(content)
    return folder


def guidance(case: str) -> Guidance:
    hyper = facts(case)["hyper"]
    return Guidance(
        text_scale=hyper["cfg_text_scale"],
        img_scale=hyper["cfg_img_scale"],
        interval=tuple(hyper["cfg_interval"]),
        renorm=hyper["cfg_renorm_type"],
        renorm_min=hyper["cfg_renorm_min"],
    )


def assert_near(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Two tensors are equal within TOLERANCE of the spread of the right one."""
    assert ours.shape == theirs.shape, what
    error = float((ours.double() - theirs.double()).abs().max() / theirs.double().std())
    assert error <= TOLERANCE, f"{what}: {error:.2e} of the standard deviation"


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def resize(picture: Tensor, height: int, width: int) -> Tensor:
    """Resize bytes [height, width, 3] as the release does."""
    import numpy as np
    from PIL import Image

    resized = Image.fromarray(picture.numpy()).resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized))


@dataclass
class HandRun:
    """One request: its labels' pages and rope ids, and the walks it has run."""

    net: BagelNet
    page_size: int = 4
    pages: dict[str, list[int]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    before_text: tuple[int, int] = (0, 0)  # slots and rope id of main that cfg_text reads

    def __post_init__(self) -> None:
        text = self.net.config.text
        layout = KVLayout(text.num_layers, text.num_kv_heads, text.head_dim, self.page_size)
        self.store = KVStore(layout, 200)
        self.attention = TorchPagedAttention(self.store, num_heads=text.num_heads)
        self.free = iter(torch.randperm(199, generator=torch.Generator().manual_seed(0)).add(1).tolist())

    # -- walks that write ----------------------------------------------------------------------------------------------

    def text(self, ids: Sequence[int], labels: Sequence[str] = ("main", "cfg_img")) -> Tensor:
        """Prefill one text with its begin and end; returns main's hidden states."""
        special = self.net.config.special
        if "cfg_img" in labels:
            self.before_text = (self.slots.get("main", 0), self.positions.get("main", 0))
        x = self.net.embed_text([special.bos, *ids, special.eos])
        first, *_ = [self._write(label, x) for label in labels]
        return first

    def seen(self, pixels: Tensor) -> Tensor:
        return self._block(self.net.embed_picture(pixels), is_gen=False)

    def encoded(self, pixels: Tensor, noise: Tensor, autoencoder: Autoencoder) -> Tensor:
        latents = autoencoder.encode(pixels[None], noise)[0]
        tokens = patchify(latents, self.net.config.latent_patch_size)
        grid = self.net.config.latent_grid(*pixels.shape[-2:])
        return self._block(self.net.embed_latents(tokens, grid, 0.0), is_gen=True)

    def decode(self, num_tokens: int, first: int | None = None) -> tuple[list[int], list[Tensor]]:
        """Feed ``first`` (bos when None), then what is sampled; returns the ids sampled and the hidden state of each step."""
        fed, ids, hidden = self.net.config.special.bos if first is None else first, [], []
        for _ in range(num_tokens):
            hidden.append(self._write("main", self.net.embed_text([fed])))
            fed = int(self.net.logits(hidden[-1][-1]).argmax())
            ids.append(fed)
        return ids, hidden

    def _block(self, embedded: Tensor, *, is_gen: bool) -> Tensor:
        mask = gen_mask(len(embedded)) if is_gen else None
        x = self.net.between_markers(embedded)
        hidden = self._write("main", x, is_gen=mask, causal=False, advance=1)
        self.before_text = (self.slots["main"], self.positions["main"])
        return hidden

    def _write(
        self, label: str, x: Tensor, *, is_gen: Tensor | None = None, causal: bool = True, advance: int | None = None
    ) -> Tensor:
        position, stop = self.positions.get(label, 0), self.slots.get(label, 0) + len(x)
        pages = self.pages.setdefault(label, [])
        while len(pages) * self.page_size < stop:
            pages.append(next(self.free))
        row = StepRow(1, label, list(pages), stop, len(x))
        self.attention.begin(StepTables(self.page_size, (row,), causal=causal))
        at = torch.arange(position, position + len(x)) if advance is None else torch.full((len(x),), position)
        hidden = self.net.decode(x, at, through_pages(self.attention), is_gen=is_gen)
        self.slots[label], self.positions[label] = stop, position + (len(x) if advance is None else advance)
        return hidden

    # -- drawing -------------------------------------------------------------------------------------------------------

    def branches(self, latents: Tensor, grid: tuple[int, int], t: Tensor, labels: Sequence[str]) -> list[Tensor]:
        """Return the velocity of each context, markers included, of one step of all of them."""
        x = self.net.between_markers(self.net.embed_latents(latents, grid, t))
        reads = [self._reads(label) for label in labels]
        rows = [
            StepRow(1, label, pages[: -(-slots // self.page_size)], slots, len(x))
            for label, (pages, slots, _) in zip(labels, reads, strict=True)
        ]
        self.attention.begin(StepTables(self.page_size, tuple(rows), causal=False, commit=False))
        positions = torch.tensor([position for *_, position in reads]).repeat_interleave(len(x))
        mask = gen_mask(len(latents)).repeat(len(labels))
        hidden = self.net.decode(x.repeat(len(labels), 1), positions, through_pages(self.attention), is_gen=mask)
        return list(self.net.velocity(hidden).split(len(x)))

    def draw(self, noise: Tensor, grid: tuple[int, int], case: str) -> tuple[list[Tensor], Tensor]:
        """Return the velocity of every step and the latents after the last."""
        hyper, guides = facts(case)["hyper"], guidance(case)
        times = timesteps(hyper["num_timesteps"], hyper["timestep_shift"])
        x, velocities = noise, []
        for t, t_next in pairwise(times):
            labels = ("main", "cfg_text", "cfg_img") if guides.is_active(float(t)) else ("main",)
            parts = [part[1:-1] for part in self.branches(x, grid, t, labels)]
            velocities.append(guide(*parts, guides) if len(parts) == 3 else parts[0])
            x = euler_step(x, velocities[-1], t, t_next)
        return velocities, x

    def _reads(self, label: str) -> tuple[list[int], int, int]:
        if label == "cfg_text":
            return self.pages.get("main", []), *self.before_text
        return self.pages.get(label, []), self.slots.get(label, 0), self.positions.get(label, 0)

    def kv(self, label: str, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a label, [slots, kv_heads, head_dim] each."""
        k, v = self.store.read(layer, self.store.selector(self.pages[label]), self.slots[label])
        return k, v


def run_context(run: HandRun, case: str, autoencoder: Autoencoder) -> HandRun:
    """Run the walks of a drawing's context in the order written."""
    given, seen = tensors(case), tensors("03_understanding")
    if facts(case)["think"]:
        system, _, prompt, _, thinking = (call["ids"] for call in facts(case)["tokenizer_calls"])
        for ids in (system, prompt):
            run.text(ids)
        run.text(thinking, labels=("main",))
        return run
    for part in facts(case)["inputs"]:
        if part.startswith("<image"):
            run.encoded(
                from_uint8(seen["resized_u8"]), given["vae_noise"] if "vae_noise" in given else vae_noise(case), autoencoder
            )
            run.seen(seen["vit_pixels"])
        else:
            run.text(ids_of(part))
    return run


def vae_noise(case: str) -> Tensor:
    return tensors(NOISE_OF[case[:2]])["vae_noise"]
