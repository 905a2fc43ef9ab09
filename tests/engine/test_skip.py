from types import SimpleNamespace

import pytest

from kvlab.engine.skip import SkipStage, probe_refusal, resolve_matches, skip_cached
from kvlab.errors import InputError
from kvlab.spec import Match, PrefixStream, Resource, Walk, WalkInputs, drop_leading

TEXT = PrefixStream("tokens", "ids", "prefill", "decode")
GUIDED = PrefixStream("tokens", "ids", "prefill", trims_guided=True)
LAID = PrefixStream("tokens", "ids", "prefill", "decode", layout_walks=("picture",), trims_guided=True)
PREFILL, DECODE, THINK = Walk("prefill"), Walk("decode", loops=True), Walk("think")
PROMPT = WalkInputs({"main": list(range(100))})


def model(**streams):
    declared = {"kv": streams or {"main": TEXT}}
    return SimpleNamespace(
        name="toy",
        prefix_key_streams=lambda: declared,
        split_inputs=lambda walk, inputs, matches: drop_leading(inputs, matches),
    )


class Answers(Resource):
    """Gives one answer, and keeps what it was told."""

    def __init__(self, **slots):
        self.answer = {label: Match(n, n) for label, n in slots.items()} or None
        self.asked, self.applied, self.unprobed = 0, [], []

    def resolve_cached_prefix(self, rid, node, walk, inputs):
        self.asked += 1
        return self.answer

    def apply_cached_prefix(self, rid, node, walk, inputs, matches):
        self.applied.append((rid, node, walk, inputs, matches))

    def note_unprobed(self, rid, node, walk, inputs, cause):
        self.unprobed.append(cause)


def skip(*resources, walk=PREFILL, inputs=PROMPT, of=None, **knobs):
    return skip_cached(of or model(), resources, 1, walk, inputs, **knobs)


# -- what is agreed on


def test_b20_the_smallest_answer_wins_and_no_opinion_is_no_zero():
    resources = (Answers(main=96), Answers(), Answers(main=32), Answers())
    trimmed, matches = skip(*resources)
    assert matches == {"main": Match(32, 32)}
    assert trimmed.ids == {"main": list(range(32, 100))}


def test_labels_are_agreed_on_apart():
    agreed = resolve_matches([Answers(main=96, cfg_img=16), Answers(main=48)], 1, "LLM", "prefill", PROMPT)
    assert agreed == {"main": Match(48, 48), "cfg_img": Match(16, 16)}


@pytest.mark.parametrize("resources", [(), (Answers(),), (Answers(main=0),), (Answers(main=96), Answers(main=0))])
def test_nothing_matched_gives_the_very_same_object(resources):
    trimmed, matches = skip(*resources)
    assert trimmed is PROMPT
    assert matches == {}


def test_every_resource_learns_the_agreed_match_on_untrimmed_inputs():
    resources = (Answers(main=96), Answers(), Answers(main=32))
    skip(*resources)
    assert all(r.applied == [(1, "LLM", "prefill", PROMPT, {"main": Match(32, 32)})] for r in resources)
    assert all(r.applied[0][3] is PROMPT for r in resources)


def test_a_match_voted_down_to_zero_is_still_told_so_that_its_pages_are_let_go():
    holder = Answers(main=96)
    skip(holder, Answers(main=0))
    assert holder.applied[0][4] == {"main": Match(0, 0)}


def test_without_an_answer_nothing_is_applied():
    resource = Answers()
    skip(resource)
    assert resource.applied == []


# -- who is asked


def test_b6_the_declaration_names_the_walk_and_falsy_step_info_is_asked_beside_it():
    undeclared, truthy, falsy = Answers(main=32), Answers(main=32), Answers(main=32)
    skip(undeclared, walk=THINK, inputs=WalkInputs(PROMPT.ids, step_info=False))
    skip(truthy, inputs=WalkInputs(PROMPT.ids, step_info=True))
    skip(falsy, inputs=WalkInputs(PROMPT.ids, step_info=False))
    assert (undeclared.asked, truthy.asked, falsy.asked) == (0, 0, 1)
    assert (undeclared.unprobed, truthy.unprobed, falsy.unprobed) == (["walk_not_keyed"], ["opaque_inputs"], [])


@pytest.mark.parametrize("more", [{"tensors": {"pixels": 1}}, {"kwargs": {"size": 1}}, {"step_info": {"requires_cfg": True}}])
def test_what_the_default_cut_cannot_slice_is_not_probed(more):
    resource, inputs = Answers(main=32), WalkInputs(PROMPT.ids, **more)
    trimmed, matches = skip(resource, inputs=inputs)
    assert trimmed is inputs
    assert (matches, resource.asked, resource.unprobed) == ({}, 0, ["opaque_inputs"])


def test_a_guided_walk_is_probed_where_every_stream_of_it_trims_guided():
    guided = WalkInputs(PROMPT.ids, step_info=True)
    assert probe_refusal(model(main=GUIDED, cfg_img=GUIDED), "prefill", guided) is None
    assert probe_refusal(model(main=GUIDED, cfg_img=TEXT), "prefill", guided) == "opaque_inputs"


def test_the_published_profile_probes_no_guided_walk_and_no_picture():
    guided = WalkInputs(PROMPT.ids, step_info=True)
    picture = WalkInputs({}, tensors={"pixels": 1})
    laid = model(main=LAID)
    assert probe_refusal(laid, "prefill", guided, profile="published") == "opaque_inputs"
    assert probe_refusal(laid, "picture", picture, profile="published") == "walk_not_keyed"
    assert probe_refusal(laid, "picture", picture) is None


def test_a_walk_that_takes_the_sampled_token_is_neither_probed_nor_noted():
    resource = Answers(main=32)
    trimmed, matches = SkipStage(model(), [resource])(1, DECODE, PROMPT)
    assert trimmed is PROMPT
    assert (matches, resource.asked, resource.unprobed) == ({}, 0, [])


def test_a_model_that_declares_nothing_is_never_probed():
    resource = Answers(main=32)
    skip(resource, of=SimpleNamespace(name="toy", prefix_key_streams=dict))
    assert (resource.asked, resource.unprobed) == (0, ["walk_not_keyed"])


# -- what fails a request


@pytest.mark.parametrize("step_info", [False, True])
def test_custom_positions_on_a_keyed_walk_fail_the_request_probed_or_not(step_info):
    inputs = WalkInputs(PROMPT.ids, positions={"main": list(range(100))}, step_info=step_info)
    with pytest.raises(InputError, match="model toy, walk prefill: it places its own positions"):
        skip(Answers(main=32), inputs=inputs)


@pytest.mark.parametrize("ids", [{}, {"main": []}])
def test_a_keyed_walk_without_ids_fails_the_request(ids):
    with pytest.raises(InputError, match="model toy, walk prefill: it is keyed by ids and its inputs have none"):
        skip(Answers(main=32), inputs=WalkInputs(ids))


def test_positions_of_an_unkeyed_walk_are_its_own_affair():
    assert probe_refusal(model(), "think", WalkInputs({}, positions={"main": [0]})) == "walk_not_keyed"


def test_unknown_profile_is_refused():
    with pytest.raises(InputError, match="'publshed'; it must be one of kvlab, published"):
        SkipStage(model(), [], profile="publshed")
