"""From prompts to plans: what runs in which order, what each pass writes and is called, and what is refused."""

from __future__ import annotations

import pickle

import golden_bagel as golden
import numpy as np
import pytest
import torch
from watched_bagel import WordTokenizer, picture

import kvlab
from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.plan import closing
from kvlab.models.bagel.prompting import THINK_THEN_ANSWER, THINK_THEN_DRAW, BagelProcessor
from kvlab.models.bagel.settings import OF_PICTURES, OF_TEXT
from kvlab.models.bagel.weights import tensor_shapes
from kvlab.models.folders import NETWORK, part_files
from kvlab.spec import Chat, Continued, Kept, Mixed, Prefix

pytest.importorskip("PIL")

SHOWN = picture()
TEXT, BLOCK = "17 233 404", (500, 17, 233, 404, 501)
ANSWER, THOUGHT = "prefill_text decode", "decode close_text image_gen"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> BagelConfig:
    folder = golden.write_model(tmp_path_factory.mktemp("bagel") / "model")
    return BagelConfig.from_folder(folder).with_shapes(tensor_shapes(part_files(folder, NETWORK)))


class Words(WordTokenizer):
    """Also knows the text that asks for thoughts before an answer."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [9, 9, 9] if text == THINK_THEN_ANSWER else super().encode(text)


@pytest.fixture(scope="module")
def processor(config) -> BagelProcessor:
    return BagelProcessor(Words(), config)


def plan(processor, prompt, seed=1):
    return processor.process_prompt(prompt, {"seed": seed}).metadata["plan"]


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "walks"),
    [
        (TEXT, ANSWER),
        ([1, 2, 3], ANSWER),
        (kvlab.chat(TEXT, system="5"), ANSWER),
        (kvlab.ask(TEXT), ANSWER),
        (kvlab.ask(TEXT, "5"), "prefill_text prefill_text decode"),
        (kvlab.ask(SHOWN), "prefill_vit decode"),
        (kvlab.ask(SHOWN, TEXT), "prefill_vit prefill_text decode"),
        (kvlab.ask("5", SHOWN, TEXT), "prefill_text prefill_vit prefill_text decode"),
        (kvlab.ask(SHOWN, "5", SHOWN, TEXT), "prefill_vit prefill_text prefill_vit prefill_text decode"),
        (kvlab.ask(SHOWN, TEXT, think=True), "prefill_text prefill_vit prefill_text decode"),
        (kvlab.draw(TEXT), "prefill_text image_gen"),
        (kvlab.draw(SHOWN, TEXT), "prefill_vae prefill_vit prefill_text image_gen"),
        (kvlab.draw(TEXT, SHOWN), "prefill_text prefill_vae prefill_vit image_gen"),
        (kvlab.draw(SHOWN, SHOWN, TEXT), "prefill_vae prefill_vit prefill_vae prefill_vit prefill_text image_gen"),
        (kvlab.draw(TEXT, think=True), f"prefill_text prefill_text {THOUGHT}"),
        (kvlab.draw(SHOWN, TEXT, think=True), f"prefill_text prefill_vae prefill_vit prefill_text {THOUGHT}"),
    ],
)
def test_walks_of_a_request(processor, prompt, walks):
    assert " ".join(plan(processor, prompt).schedule(5)) == walks
    assert " ".join(plan(processor, prompt).schedule(0)) == walks.split(" decode")[0].removesuffix(" image_gen")


def test_the_texts_that_ask_for_thoughts_are_the_released_ones(processor):
    assert golden.facts("07_think_t2i")["tokenizer_calls"][0]["text"] == THINK_THEN_DRAW
    assert "reasoning process" in THINK_THEN_ANSWER
    assert THINK_THEN_ANSWER.count(" \n") == 1
    thought = plan(processor, kvlab.ask(TEXT, think=True))
    assert thought.passes[0].ids == (500, 9, 9, 9, 501)
    assert len(plan(processor, kvlab.draw(TEXT, think=True)).passes[0].ids) == 35


def test_what_closes_thoughts():
    assert closing([5, 6], 501) == [6, 501]
    assert closing([5, 501], 501) == [501]


# -- ids and labels ----------------------------------------------------------------------------------------------------


def test_every_text_is_a_block_without_roles(processor):
    record = processor.process_prompt(kvlab.chat(TEXT, system="5"), {})
    assert record.tensors == {"tokens": [500, 5, 501, *BLOCK]}
    assert record.layouts == {"kv": {}}
    assert processor.process_prompt(TEXT, {}).tensors == {"tokens": list(BLOCK)}
    assert processor.process_prompt([1, 2], {}).tensors == {"tokens": [1, 2]}


def test_a_guided_picture_has_its_texts_again_without_the_pictures(processor):
    record = processor.process_prompt(kvlab.draw("5", SHOWN, TEXT), {"seed": 1})
    assert record.tensors == {"tokens": [500, 5, 501, *BLOCK], "cfg_img": [500, 5, 501, *BLOCK]}
    spans = record.layouts["kv"]
    assert [(s.kind, s.walk, s.length, s.advance) for s in spans["main"]] == [
        ("ids", "prefill_text", 3, 3),
        ("digest", "prefill_vae", 14, 1),
        ("digest", "prefill_vit", 17, 1),
        ("ids", "prefill_text", 5, 5),
    ]
    assert [s.length for s in spans["cfg_img"]] == [3, 5]


def test_an_unguided_picture_has_main_alone(processor):
    record = processor.process_prompt(kvlab.draw(TEXT, cfg_text_scale=1.0), {"seed": 1})
    assert list(record.tensors) == ["tokens"]
    assert record.layouts == {"kv": {}}


@pytest.mark.parametrize(
    ("prompt", "slots", "positions"),
    [
        (kvlab.draw(TEXT), 0, 0),
        (kvlab.draw("5", TEXT), 3, 3),
        (kvlab.draw(TEXT, think=True), 35, 35),
        (kvlab.draw(SHOWN, TEXT), 31, 2),
        (kvlab.draw("5", SHOWN, TEXT), 34, 5),
        (kvlab.draw(TEXT, SHOWN), 36, 7),
    ],
)
def test_what_is_left_without_the_latest_text(processor, prompt, slots, positions):
    assert plan(processor, prompt).without_latest_text() == Prefix("main", slots, positions)


def test_only_guided_texts_carry_what_the_published_system_does_not_cut(processor):
    assert plan(processor, kvlab.draw(TEXT)).inputs(0).opaque
    assert not plan(processor, kvlab.draw(TEXT, cfg_text_scale=1.0)).inputs(0).opaque
    assert not plan(processor, kvlab.ask(SHOWN, TEXT)).inputs(1).opaque


def test_a_record_travels_to_another_process(processor):
    record = processor.process_prompt(kvlab.draw(SHOWN, TEXT), {"seed": 3})
    other = pickle.loads(pickle.dumps(processor)).process_prompt(kvlab.draw(SHOWN, TEXT), {"seed": 3})
    carried = pickle.loads(pickle.dumps(record))
    assert carried.layouts == other.layouts == record.layouts
    assert carried.tensors == other.tensors


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_reply_is_kept_as_generated_and_gets_its_end(processor):
    messages = (("user", TEXT), ("assistant", "7 8"), ("user", "5"))
    ids = processor.process_prompt(Chat(messages, (*BLOCK, 500, 7, 8), 2), {}).tensors["tokens"]
    assert ids == [*BLOCK, 500, 7, 8, 501, 500, 5, 501]
    assert ids == processor.process_prompt(Chat(messages), {}).tensors["tokens"]
    assert processor.process_prompt(Continued((*BLOCK, 500, 7, 8), "5"), {}).tensors["tokens"] == ids


def test_a_kept_reply_among_pictures_is_a_block(processor):
    record = processor.process_prompt(kvlab.ask(SHOWN, TEXT, Kept((7, 8)), "5"), {})
    assert record.tensors["tokens"] == [*BLOCK, 500, 7, 8, 501, 500, 5, 501]
    assert record.fork is None


def test_a_reply_that_its_text_would_not_give_again_is_told(processor):
    chat = Chat((("user", TEXT), ("assistant", "7 8"), ("user", "5")), (*BLOCK, 500, 7, 9), 2)
    fork = processor.process_prompt(chat, {}).fork
    assert (fork.index, fork.kept_id, fork.retokenised_id) == (7, 9, 8)

    class Merging(Words):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [78] if text == "7 8" else super().encode(text)

    forked = BagelProcessor(Merging(), processor.config).process_prompt(kvlab.ask(SHOWN, Kept((7, 8)), "5"), {})
    assert (forked.fork.index, forked.fork.kept_id, forked.fork.retokenised_id) == (1, 7, 78)


def test_an_empty_reply_is_a_block_of_nothing(processor):
    assert processor.process_prompt(kvlab.ask(TEXT, Kept(()), "5"), {}).tensors["tokens"][5:7] == [500, 501]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_defaults_are_the_released_ones(processor):
    of_text, edit = (plan(processor, kvlab.draw(*parts)).drawing for parts in ((TEXT,), (SHOWN, TEXT)))
    assert (of_text.num_timesteps, of_text.timestep_shift) == (50, 3.0) == (edit.num_timesteps, edit.timestep_shift)
    g = of_text.guidance
    assert (g.text_scale, g.img_scale, g.interval, g.renorm, g.renorm_min) == (4.0, 1.0, (0.4, 1.0), "global", 0.0)
    g = edit.guidance
    assert (g.text_scale, g.img_scale, g.interval, g.renorm, g.renorm_min) == (4.0, 2.0, (0.0, 1.0), "text_channel", 0.0)
    assert (OF_TEXT["cfg_img_scale"], OF_PICTURES["cfg_img_scale"]) == (1.0, 2.0)


def test_the_size_asked_for_else_the_first_pictures_else_the_models(processor):
    def size(prompt):
        drawing = plan(processor, prompt).drawing
        return drawing.height, drawing.width

    tall = np.zeros((90, 45, 3), dtype=np.uint8)
    assert size(kvlab.draw(TEXT)) == (64, 64)
    assert size(kvlab.draw(tall, SHOWN, TEXT)) == (64, 32)
    assert size(kvlab.draw(SHOWN, TEXT, size=(32, 80))) == (32, 80)


def test_without_a_text_there_is_nothing_to_guide_by(processor):
    assert not plan(processor, kvlab.draw(SHOWN)).is_guided
    with pytest.raises(InputError, match="no text to follow"):
        plan(processor, kvlab.draw(SHOWN, cfg_text_scale=4.0))


def test_an_image_scale_alone_says_that_it_does_nothing(processor):
    drawing = plan(processor, kvlab.draw(TEXT, cfg_text_scale=1.0, cfg_img_scale=1.5)).drawing
    assert "cfg_img_scale 1.5 does nothing" in drawing.note
    assert plan(processor, kvlab.draw(SHOWN, TEXT)).drawing.note is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"num_timesteps": 1}, "num_timesteps is 1; it must be a whole number of at least 2"),
        ({"num_timesteps": 5.0}, "num_timesteps is 5.0"),
        ({"num_timesteps": True}, "num_timesteps is True"),
        ({"timestep_shift": 0}, "timestep_shift is 0; give a number above 0"),
        ({"timestep_shift": float("nan")}, "timestep_shift is nan"),
        ({"cfg_text_scale": -1}, "cfg_text_scale is -1; give a number of at least 0"),
        ({"cfg_img_scale": "2"}, "cfg_img_scale is '2'"),
        ({"cfg_interval": (0.6, 0.4)}, "cfg_interval"),
        ({"cfg_interval": 0.4}, "cfg_interval is 0.4"),
        ({"cfg_interval": (0.4, 2)}, "cfg_interval"),
        ({"cfg_renorm": "local"}, "cfg_renorm is 'local'; known are global, channel, text_channel"),
        ({"cfg_renorm_min": 1.5}, "cfg_renorm_min is 1.5"),
        ({"vae_sample": "mode"}, "vae_sample is 'mode'; it must be one of sample, mean"),
        ({"size": (50, 64)}, "nearest size is (48, 64)"),
        ({"noise": torch.zeros(3, 64)}, "noise has shape [3, 64]; this picture's noise has shape [12, 64]"),
        ({"noise": "red"}, "noise is 'red'"),
        ({"noise": torch.full((12, 64), float("inf"))}, "not finite"),
        ({"vae_noise": [torch.zeros(16, 6, 8)] * 2}, "vae_noise has 2 entries and there are 1 pictures"),
        ({"vae_noise": [torch.zeros(16, 8, 6)]}, "vae_noise 0 has shape [16, 8, 6]"),
        ({"vae_noise": 3}, "vae_noise is 3"),
        ({"vae_noise": [torch.zeros(16, 6, 8)], "vae_sample": "mean"}, "leave one of them out"),
    ],
)
def test_a_setting_that_cannot_be_is_named(processor, setting, said):
    with pytest.raises(InputError) as error:
        processor.process_prompt(kvlab.draw(SHOWN, TEXT, **setting), {"seed": 1})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (kvlab.draw(), "no parts"),
        (kvlab.ask(), "no parts"),
        (kvlab.ask(""), "text is empty"),
        (kvlab.draw(TEXT, ""), "text is empty"),
        (kvlab.ask(TEXT, 3), "a part of the prompt is a int"),
        (kvlab.ask(TEXT, [1, 2]), "a part of the prompt is a list"),
        (kvlab.ask(Kept((1, 600))), "kept id 1 is 600"),
        (Mixed((TEXT,), "sound"), "output is 'sound'"),
        (Mixed((TEXT,), "picture", 1), "think is 1"),
        (Mixed((TEXT,), "picture", settings={"num_timestep": 3}), "unknown setting 'num_timestep' of a picture; did you mean"),
        (Mixed((TEXT,), "picture", settings={"colour": 3}), "known are cfg_img_scale"),
        (Mixed((TEXT,), "text", settings={"size": (64, 64)}), "the answer is words"),
        (kvlab.ask(np.zeros((0, 3, 3), dtype=np.uint8)), "has none to look at"),
        (Chat(()), "no message"),
        (Continued((1,), 3), "give a str"),
        ([], "empty"),
        ([600], "id 0 is 600"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(processor, prompt, said):
    with pytest.raises(InputError) as error:
        processor.process_prompt(prompt, {"seed": 1})
    assert said in str(error.value)


@pytest.mark.parametrize("seed", [1.0, "7", True, (1,)])
def test_a_seed_that_is_no_whole_number_is_refused(processor, seed):
    with pytest.raises(InputError, match="the seed is"):
        processor.process_prompt(kvlab.draw(TEXT), {"seed": seed})


def test_an_unknown_field_is_named(processor):
    with pytest.raises(InputError, match="knows no field 'size'"):
        processor.process_prompt(kvlab.draw(TEXT), {"seed": 1, "size": (64, 64)})


def test_more_than_the_context_holds_is_told_in_positions(config):
    small = BagelProcessor(Words(), config, max_seq_len=12)
    small.process_prompt(kvlab.ask(*[SHOWN] * 11), {})
    with pytest.raises(InputError, match=r"takes 12 positions \(0 text tokens and one for each of 12 encoded pictures\)"):
        small.process_prompt(kvlab.ask(*[SHOWN] * 12), {})
    with pytest.raises(InputError, match=r"takes 14 positions \(14 text tokens"):
        small.process_prompt(" ".join(["7"] * 12), {})
