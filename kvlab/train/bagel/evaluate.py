"""What the judge sees in drawn pictures, and whether answers are right, all on scenes that no training saw."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from kvlab.models.bagel.autoencoder import Autoencoder, from_uint8
from kvlab.models.bagel.network import BagelNet
from kvlab.models.bagel.patches import patchify
from kvlab.models.bagel.weights import load_bagel
from kvlab.train.bagel import edits, judge, network, packing, pool, questions, sampling, scenes
from kvlab.train.bagel.sampling import Given
from kvlab.train.bagel.scenes import Pixels
from kvlab.train.bagel.vocabulary import Texts

NUM_OF_A_KIND = 64
EVALUATION_SEED = 2
ARRANGEMENTS = {"one_shape": ("one",), "two_shapes": ("row", "column"), "three_shapes": ("three",)}


def evaluate(folder: Path, *, num: int = NUM_OF_A_KIND, seed: int = EVALUATION_SEED) -> dict[str, Any]:
    """Return the judged shares of a checkpoint.

    Raises:
        LoadError: the folder holds no BAGEL network.
    """
    net, autoencoder = load_bagel(folder)
    return measure(net, autoencoder, Texts(AutoTokenizer.from_pretrained(folder)), num=num, seed=seed)


def measure(net: BagelNet, autoencoder: Autoencoder, texts: Texts, *, num: int, seed: int) -> dict[str, Any]:
    """Return the judged shares of a network in hand, ``num`` requests of every kind."""
    judged = Examiner(net, autoencoder, texts, seed)
    found: dict[str, Any] = {"requests_of_a_kind": num}
    for name, arrangements in ARRANGEMENTS.items():
        found[name] = judged.drawn(arrangements, num)
    return found | {
        "edits": judged.edited(num),
        "questions": judged.answered(num),
        "descriptions": judged.described(num),
        "chats": judged.chatted(num),
        "true_pictures": judged.true_pictures(num),
        "autoencoder": judged.through_autoencoder(num),
    }


def glance(judged: Examiner, num: int) -> dict[str, float]:
    """Return a few shares of a network in training, of few requests: to see early what goes wrong."""
    drawn = {name: judged.drawn(ARRANGEMENTS[name], num)["right"] for name in ("one_shape", "two_shapes")}
    return drawn | {"edits": judged.edited(num)["right"], "questions": judged.answered(num)["right"]}


class Examiner:
    """Asks a network for what no training saw, and judges it."""

    def __init__(self, net: BagelNet, autoencoder: Autoencoder, texts: Texts, seed: int) -> None:
        self._net, self._autoencoder, self._texts, self._seed = net, autoencoder, texts, seed

    def _scenes(self, num: int, *arrangements: str) -> list[scenes.Scene]:
        draw = random.Random(f"{self._seed} {arrangements}")
        return [scenes.any_scene(draw, held_out=True, arrangement=arrangements[i % len(arrangements)]) for i in range(num)]

    def _drawings(self, num: int) -> list[scenes.Drawing]:
        draw = random.Random(self._seed)
        return [scenes.drawing(scenes.any_scene(draw, held_out=True), draw) for _ in range(num)]

    def _text(self, text: str) -> packing.Part:
        return packing.text(self._texts.ids(text))

    # -- pictures ------------------------------------------------------------------------------------------------------

    def draw(self, captions: Sequence[str]) -> list[Pixels]:
        """Return a picture of each caption."""
        latents = sampling.draw(self._net, [[self._text(caption)] for caption in captions], sampling.OF_TEXT, seed=self._seed)
        return sampling.decode(self._autoencoder, latents)

    def drawn(self, arrangements: Sequence[str], num: int) -> dict[str, float]:
        """Return how often pictures show what captions say."""
        asked = self._scenes(num, *arrangements)
        draw = random.Random(self._seed)
        return _shares(self.draw([draw.choice(scenes.captions(scene)) for scene in asked]), asked)

    def edit(self, asked: Sequence[edits.Edit]) -> list[Pixels]:
        """Return the pictures that come of edits."""
        contexts = [[*packing.pictured(i), self._text(edit.text)] for i, edit in enumerate(asked)]
        given = self.given([edit.source.pixels() for edit in asked])
        latents = sampling.draw(self._net, contexts, sampling.OF_PICTURES, seed=self._seed, given=given)
        return sampling.decode(self._autoencoder, latents)

    def edited(self, num: int) -> dict[str, float]:
        """Return how often edits change what was asked and keep the rest, in all and by kind."""
        draw = random.Random(self._seed)
        asked = [edits.any_edit(draw, held_out=True, kind=edits.KINDS[i % len(edits.KINDS)]) for i in range(num)]
        pictures = self.edit(asked)
        shares = _shares(pictures, [edit.target.scene for edit in asked])
        for kind in edits.KINDS:
            pairs = [(picture, edit.target.scene) for picture, edit in zip(pictures, asked, strict=True) if edit.kind == kind]
            shares[kind] = judge.share(*zip(*pairs, strict=True)) if pairs else 0.0
        return shares

    def given(self, pictures: Sequence[Pixels]) -> Given:
        """Return pictures as requests refer to them."""
        pixels = torch.from_numpy(np.stack(pictures))
        with torch.no_grad():
            latents = self._autoencoder.encode(from_uint8(pixels))
        return Given(patchify(latents, network.CONFIG.latent_patch_size), pool.for_vision(pixels))

    # -- words ---------------------------------------------------------------------------------------------------------

    def answered(self, num: int) -> dict[str, float]:
        """Return how often questions about pictures are answered right, in all and by kind."""
        drawings, draw = self._drawings(num * len(questions.KINDS) // 2), random.Random(self._seed)
        turns = [questions.any_question(drawing.scene, draw) for drawing in drawings]
        return self._asked(drawings, turns)

    def described(self, num: int) -> dict[str, float]:
        """Return how often a picture is described word for word as its scene."""
        drawings = self._drawings(num)
        return self._asked(drawings, [questions.description(drawing.scene) for drawing in drawings])

    def _asked(self, drawings: Sequence[scenes.Drawing], turns: Sequence[questions.Turn]) -> dict[str, float]:
        contexts = [[packing.Part("vit", picture=i), self._text(turn.asked)] for i, turn in enumerate(turns)]
        said = sampling.answers(self._net, contexts, given=self.given([drawing.pixels() for drawing in drawings]))
        right = [self._texts.words(ids) == turn.answer for ids, turn in zip(said, turns, strict=True)]
        return _by_kind([turn.kind for turn in turns], right)

    def chatted(self, num: int) -> dict[str, float]:
        """Return how often the turns of chats without pictures are answered right, each after its own earlier answers."""
        draw = random.Random(self._seed)
        told = [questions.any_chat(draw, held_out=True, num_turns=2) for _ in range(num)]
        contexts: list[list[packing.Part]] = [[] for _ in told]
        found = {}
        for name, turns in zip(("first_turn", "second_turn"), zip(*told, strict=True), strict=True):
            contexts = [[*context, self._text(turn.asked)] for context, turn in zip(contexts, turns, strict=True)]
            said = sampling.answers(self._net, contexts)
            found[name] = float(np.mean([self._texts.words(ids) == turn.answer for ids, turn in zip(said, turns, strict=True)]))
            contexts = [[*context, packing.text(ids)] for context, ids in zip(contexts, said, strict=True)]
        return found

    # -- what bounds the rest ------------------------------------------------------------------------------------------

    def true_pictures(self, num: int) -> dict[str, float]:
        """Return what the judge says of true pictures, and of true pictures of other scenes."""
        drawings = self._drawings(num)
        asked, pictures = [drawing.scene for drawing in drawings], [drawing.pixels() for drawing in drawings]
        return {"right": judge.share(pictures, asked), "of_other_scenes": judge.share(pictures, asked[1:] + asked[:1])}

    def through_autoencoder(self, num: int) -> dict[str, float]:
        """Return what the judge says of true pictures after the autoencoder, and their signal-to-noise ratio."""
        drawings = self._drawings(num)
        pixels = torch.from_numpy(np.stack([drawing.pixels() for drawing in drawings]))
        with torch.no_grad():
            made = self._autoencoder.decode(self._autoencoder.encode(from_uint8(pixels))).clamp(-1, 1)
        noise = (made - from_uint8(pixels)).square().mean()
        pictures = sampling.decode(self._autoencoder, self.given(list(pixels.numpy())).latents)
        right = judge.share(pictures, [drawing.scene for drawing in drawings])
        return {"right": right, "signal_to_noise_db": float(10 * torch.log10(4 / noise))}


def _shares(pictures: Sequence[Pixels], asked: Sequence[scenes.Scene]) -> dict[str, float]:
    """Return the share of pictures all right, and of backgrounds, colours and shapes each by itself."""
    seen = [judge.look(picture, scene.arrangement) for picture, scene in zip(pictures, asked, strict=True)]
    pairs = list(_things(seen, asked))
    return {
        "right": judge.share(pictures, asked),
        "backgrounds": float(np.mean([found.background == scene.background for found, scene in zip(seen, asked, strict=True)])),
        "colours": float(np.mean([found is not None and found.colour == thing.colour for found, thing in pairs])),
        "shapes": float(np.mean([found is not None and found.shape == thing.shape for found, thing in pairs])),
    }


def _things(seen: Sequence[judge.Found], asked: Sequence[scenes.Scene]) -> Iterator[tuple[scenes.Thing | None, scenes.Thing]]:
    for found, scene in zip(seen, asked, strict=True):
        yield from zip(found.things, scene.things, strict=True)


def _by_kind(kinds: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for kind, is_right in zip(kinds, right, strict=True):
        groups[kind].append(is_right)
    found = {"right": float(np.mean(right))}
    return found | ({kind: float(np.mean(group)) for kind, group in sorted(groups.items())} if len(groups) > 1 else {})
