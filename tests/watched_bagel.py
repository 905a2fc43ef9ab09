"""The small BAGEL of the right values in an engine whose every pass can be looked at, and its requests checked against them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import golden_bagel as golden
import torch
from golden_bagel import assert_near
from torch import Tensor

import kvlab
from kvlab.assemble import build_engine
from kvlab.attention.torch_paged import TorchPagedAttention
from kvlab.engine.engine import Engine
from kvlab.engine.request import GenerationResult
from kvlab.models.bagel.loading import load_bagel_model
from kvlab.models.bagel.prompting import THINK_THEN_DRAW, BagelProcessor
from kvlab.models.bagel.spec import BagelModel
from kvlab.spec import StepRow, StepTables

LABELS = {"main": "ctx_main_", "cfg_text": "ctx_text_", "cfg_img": "ctx_img_"}


class WordTokenizer:
    """Text is blank-separated ids, and the one English text of the right values has the ids they give it."""

    eos_token_id = 501

    def __init__(self) -> None:
        self._system = tuple(golden.facts("07_think_t2i")["tokenizer_calls"][0]["ids"])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._system) if text == THINK_THEN_DRAW else golden.ids_of(text)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        hidden = {500, 501} if options.get("skip_special_tokens") else set()
        return " ".join(str(i) for i in ids if i not in hidden)


@dataclass
class Seen:
    """One row of one pass: what it read and wrote, what went into the decoder and what came out of it and of the model."""

    walk: str
    row: StepRow
    positions: list[int]
    embedded: Tensor
    hidden: Tensor
    out: Any


class WatchedAttention(TorchPagedAttention):
    """Keeps the last tables it was begun with."""

    tables: StepTables

    def begin(self, tables: StepTables) -> None:
        self.tables = tables
        super().begin(tables)


class Watched:
    """An engine over ``model``, which it watches: ``seen`` has every row of every pass."""

    def __init__(self, model: BagelModel, page_size: int = 4, **settings: Any) -> None:
        self.model, self.seen = model, []
        self.engine: Engine = build_engine(
            model,
            page_size=page_size,
            attention=lambda store: WatchedAttention(store, num_heads=model.num_heads),
            **({"num_pages": 400} | settings),
        )
        self._before = [(owner, name, vars(owner).get(name)) for owner, name in ((model.net, "decode"), (model, "forward"))]
        self._decode, self._forward = model.net.decode, model.forward
        model.net.decode, model.forward = self._watch_decode, self._watch_forward

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, before in self._before:
            vars(owner).pop(name)  # what its class defines shows again ...
            if before is not None:
                setattr(owner, name, before)  # ... or the watch around this one
        self.engine.check()
        self.engine.close()

    def _watch_decode(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self._decode(x, *args, **kwargs)
        self._last = (x, hidden)
        return hidden

    def _watch_forward(self, walk: str, rows: Sequence[Any], attention: WatchedAttention) -> Sequence[Any]:
        outs = self._forward(walk, rows, attention)
        sizes = [len(row.positions) for row in rows]
        parts = zip(attention.tables.rows, rows, *(x.split(sizes) for x in self._last), outs, strict=True)
        self.seen += [Seen(walk, table, list(row.positions), x, h, out) for table, row, x, h, out in parts]
        return outs

    def generate(self, prompt: Any, **options: Any) -> GenerationResult:
        """Run one request and keep only what is seen of it."""
        self.seen.clear()
        result = self.engine.generate(prompt, **options)
        if result.error is not None:
            raise result.error
        return result

    def walks(self) -> list[str]:
        """Names of the walks whose passes were seen, in order and each once."""
        return list(dict.fromkeys(s.walk for s in self.seen))

    def rows(self, walk: str, label: str = "main", rid: Any = None) -> list[Seen]:
        return [s for s in self.seen if s.walk == walk and s.row.label == label and rid in (None, s.row.rid)]

    def kv(self, label: str = "main", rid: Any = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the values of K and V of every layer, in the pages that a label last had."""
        row = next(s.row for s in reversed(self.seen) if s.row.label == label and rid in (None, s.row.rid))
        store = self.engine.attention.store
        for layer in range(store.layout.num_layers):
            for name, values in zip("kv", store.read(layer, store.selector(row.pages), row.length), strict=True):
                yield f"{name}.{layer}", values


def load_watched_model(folder: Path) -> BagelModel:
    """Return the small model with a tokenizer of words."""
    model = load_bagel_model(golden.write_model(folder), "golden")
    processor = BagelProcessor(WordTokenizer(), model.config)
    return BagelModel(
        model.net,
        model.autoencoder,
        processor,
        name=model.name,
        identity=model.identity,
        checkpoint_path=model.checkpoint_path(),
        pinned_sha256=model.pinned_sha256,
    )


def copied(model: BagelModel) -> BagelModel:
    """Return a model that may be spoiled."""
    other = copy.copy(model)
    other.net, other.autoencoder = copy.deepcopy(model.net), copy.deepcopy(model.autoencoder)
    return other


# -- requests ----------------------------------------------------------------------------------------------------------


def texts(case: str) -> list[str]:
    facts = golden.facts(case)
    return [facts["turn1_text"], facts["turn2_text"]]


def picture(name: str = "image_u8", case: str = "03_understanding") -> Any:
    return golden.tensors(case)[name].numpy()


def vae_noise(case: str) -> Tensor:
    given = golden.tensors(case)
    return given["vae_noise"] if "vae_noise" in given else golden.vae_noise(case)


def drawing(case: str, **changes: Any) -> Any:
    """Return the prompt of a case that draws."""
    facts = golden.facts(case)
    hyper = dict(facts["hyper"])
    hyper["cfg_renorm"] = hyper.pop("cfg_renorm_type")
    parts = [picture() if part.startswith("<image") else part for part in facts["inputs"]]
    noises = {"vae_noise": [vae_noise(case)[0]]} if any(not isinstance(p, str) for p in parts) else {}
    settings = {**hyper, **noises, "size": tuple(facts["image_shape_hw"]), "noise": golden.start_noise(case), **changes}
    return kvlab.draw(*parts, think=facts["think"], **settings)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_tail(rows: Sequence[Tensor], expected: Tensor, what: str) -> None:
    """What ran equals the end of what is right; the front may have been served from pages."""
    if rows:
        ours = torch.cat(list(rows))
        assert_near(ours, expected[len(expected) - len(ours) :] if len(ours) < len(expected) else expected, what)


def check_kv(watched: Watched, label: str, expected: dict[str, Tensor], prefix: str = "", rid: Any = None) -> None:
    """The first slots of a label hold what is right; a reply may follow."""
    for name, ours in watched.kv(label, rid):
        right = expected[prefix + name]
        assert_near(ours[: len(right)], right, f"{label} {prefix}{name}")


def check_01(watched: Watched) -> GenerationResult:
    case = golden.tensors("01_text_prefill")
    result = watched.generate(kvlab.ask(*texts("01_text_prefill")), max_tokens=0)
    ran = torch.cat([s.hidden for s in watched.rows("prefill_text")])
    hidden = torch.cat([case["turn1_hidden"], case["turn2_hidden"]])
    logits = torch.cat([case["turn1_logits"], case["turn2_logits"]])
    check_tail([ran], hidden, "hidden")
    check_tail([watched.model.net.logits(ran)], logits, "logits")
    check_kv(watched, "main", case, "turn2_")
    return result


def check_02(watched: Watched) -> GenerationResult:
    case = golden.tensors("02_text_decode")
    result = watched.generate(kvlab.ask(*texts("01_text_prefill")), max_tokens=13)
    assert list(result.ids) == case["sampled_ids"].tolist()
    steps = watched.rows("decode")
    assert_near(torch.cat([s.hidden for s in steps]), case["hidden"], "hidden")
    assert_near(torch.cat([s.out for s in steps]), case["logits"], "logits")
    assert [s.positions for s in steps] == [call["rope_ids"] for call in golden.facts("02_text_decode")["calls"]]
    check_kv(watched, "main", case)
    return result


def check_03(watched: Watched) -> GenerationResult:
    case, facts = golden.tensors("03_understanding"), golden.facts("03_understanding")
    result = watched.generate(kvlab.ask(picture(), facts["text"]), max_tokens=7)
    assert list(result.ids)[:6] == golden.ids_of(facts["output_string"])
    assert result.text.startswith(facts["output_string"])
    check_tail([s.embedded for s in watched.rows("prefill_vit")], case["image_query"], "image_query")
    check_tail([s.hidden for s in watched.rows("prefill_vit")], case["image_hidden"], "image_hidden")
    check_tail([s.hidden for s in watched.rows("prefill_text")], case["text_hidden"], "text_hidden")
    steps = watched.rows("decode")
    assert_near(torch.cat([s.hidden for s in steps]), case["decode_hidden"], "decode_hidden")
    assert_near(torch.cat([s.out for s in steps]), case["decode_logits"], "decode_logits")
    assert [s.positions for s in steps] == [call["rope_ids"] for call in facts["calls"][3:]]
    check_kv(watched, "main", case)
    return result


def check_04(watched: Watched) -> GenerationResult:
    case = golden.tensors("04_vae")
    result = watched.generate(kvlab.draw(picture(), vae_noise=case["noise"], num_timesteps=2))
    (block,) = watched.rows("prefill_vae")
    assert_near(block.embedded, case["image_query"], "image_query")
    assert_near(block.hidden, case["image_hidden"], "image_hidden")
    assert block.positions == golden.facts("04_vae")["calls"][0]["rope_ids"]
    check_kv(watched, "main", case)
    return result


def check_drawing(watched: Watched, case: str) -> GenerationResult:
    expected, facts = golden.tensors(case), golden.facts(case)
    result = watched.generate(drawing(case), max_tokens=4)
    assert result.text == (facts["text_output"] or "")
    steps = watched.rows("image_gen")
    assert_near(torch.stack([s.out for s in steps]), expected["v_t"], "v_t")
    for label, context in facts["contexts"].items():
        for now in watched.rows("image_gen", label)[:1]:
            assert (now.row.length, set(now.positions)) == (context["rows"], set(context["ropes"])), label
            if f"{LABELS[label]}k.0" in expected:
                check_kv(watched, label, expected, LABELS[label])
    check_branches(watched, expected)
    assert result.pixels.shape == expected["image_u8"].shape
    assert (result.pixels.int() - expected["image_u8"].int()).abs().max() <= 1
    return result


def check_branches(watched: Watched, expected: dict[str, Tensor]) -> None:
    for label, name in (("main", "branch_cond"), ("cfg_text", "branch_cfg_text"), ("cfg_img", "branch_cfg_img")):
        if name in expected:
            velocities = [watched.model.net.velocity(s.hidden) for s in watched.rows("image_gen", label)]
            assert_near(torch.stack(velocities), expected[name], name)


def check_09(watched: Watched) -> GenerationResult:
    case, facts = golden.tensors("09_packed_two_requests"), golden.facts("09_packed_two_requests")
    shown = [picture(), picture("image1_original_u8", "09_packed_two_requests")]
    watched.seen.clear()
    handles = [
        watched.engine.submit(kvlab.ask(*text, image), max_tokens=1) for text, image in zip(facts["texts"], shown, strict=True)
    ]
    results = [handle.result() for handle in handles]
    for result, rows, rope in zip(results, (slice(0, 37), slice(37, 67)), facts["ropes_after"], strict=True):
        assert result.error is None
        check_kv(watched, "main", {name: value[rows] for name, value in case.items()}, rid=result.rid)
        (reply,) = watched.rows("decode", rid=result.rid)
        assert reply.positions == [rope]
    return replace(results[0], cached_tokens=min(result.cached_tokens for result in results))


CHECKS: dict[str, Callable[[Watched], GenerationResult]] = {
    "01_text_prefill": check_01,
    "02_text_decode": check_02,
    "03_understanding": check_03,
    "04_vae": check_04,
    "09_packed_two_requests": check_09,
}


def check(watched: Watched, case: str) -> GenerationResult:
    """Run a case and compare all that is known of it.

    Raises:
        AssertionError: something is not as it should be.
    """
    return CHECKS[case](watched) if case in CHECKS else check_drawing(watched, case)
