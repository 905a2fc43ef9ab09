import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvlab.engine.declare import check_declaration, moved_root, open_caches, report_sizing
from kvlab.engine.positions import Positions
from kvlab.engine.sampler import Sampler
from kvlab.errors import LoadError
from kvlab.spec import PrefixStream, Resource, Walk

TEXT = PrefixStream("tokens", "ids", "prefill", "decode")
LAID = replace(TEXT, layout_walks=("vit",))
WALKS = {w.name: w for w in (Walk("prefill"), Walk("decode", loops=True), Walk("vit"), Walk("other", node="CODEC"))}


@dataclass
class Model:
    """What a declaration needs of a model."""

    streams: dict[str, Any] = field(default_factory=lambda: {"kv": {"main": TEXT}})
    walk_of: dict[str, Walk] = field(default_factory=lambda: dict(WALKS))
    labels: dict[str, Any] = field(default_factory=lambda: {"kv": ("main",)})
    path: str | None = None
    name: str = "toy"
    preprocessing: str = "Toy"

    def walks(self):
        return self.walk_of

    def kv_labels(self):
        return self.labels

    def prefix_key_streams(self):
        return self.streams

    def checkpoint_path(self):
        return self.path

    def preprocess_fingerprint(self):
        return self.preprocessing


class Pages(Resource):
    """Keeps an index of its own kind: no KVResource anywhere."""

    prefix_skip_safe = True

    def __init__(self, key="kv", *, prefix_cache=True, **fields):
        self.key, self.prefix_cache = key, prefix_cache
        self.fields = {"page_size": 16, "dtype": "float32", "salt": "", **fields}
        self.opened, self.resets, self.index = [], [], None

    def root_fields(self):
        return self.fields

    def enable_prefix_cache(self, base_root, walks):
        self.opened.append((base_root, walks))
        self.index = {} if self.prefix_cache else None

    def reset_prefix_cache(self, reason="asked", base_root=None):
        self.resets.append((reason, base_root))
        return True


class Recurrent(Resource):
    """A state that cannot begin in the middle."""

    key = "ssm"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", b"\x01" * 64)


def write_checkpoint(path, weights):
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + weights)
    return str(path)


# -- what is refused


def refused(model, *resources):
    with pytest.raises(LoadError) as caught:
        check_declaration(model, resources)
    return str(caught.value)


def test_a_sound_declaration_passes():
    check_declaration(Model({"kv": {"main": LAID}}), [Pages(), Positions(), Sampler(8)])


@pytest.mark.parametrize("streams", [{}, {"kv": {"main": TEXT}}])
def test_positions_of_another_scheme_are_refused_over_a_keyed_cache_only(streams):
    resources = [Pages(), Positions(scheme="blocks")]
    if not streams:
        return check_declaration(Model(streams), resources)
    message = refused(Model(streams), *resources)
    assert all(part in message for part in ("positions", "blocks", "kv", "LLM", "prefill", "toy"))


def test_a_resource_that_is_not_skip_safe_is_refused_on_the_keyed_node():
    message = refused(Model(), Pages(), Recurrent())
    assert all(part in message for part in ("ssm", "kv", "LLM", "prefill", "toy", "prefix_skip_safe"))


def test_resources_of_other_nodes_are_free():
    codec_state = Recurrent()
    codec_state.node = "CODEC"
    check_declaration(Model(), [Pages(), codec_state])


@pytest.mark.parametrize("streams", [{"walk": "prefil"}, {"decode_walk": "prefil"}, {"layout_walks": ("vit", "prefil")}])
def test_an_unknown_walk_is_refused_with_the_real_ones(streams):
    message = refused(Model({"kv": {"main": replace(TEXT, **streams)}}), Pages())
    assert "walk prefil for kv/main" in message
    assert "decode, other, prefill, vit" in message


def test_an_unknown_resource_or_label_is_refused_with_the_real_ones():
    assert "declares streams of resource kvv, and is loaded with kv" in refused(Model({"kvv": {"main": TEXT}}), Pages())
    assert "label mian of resource kv, whose labels are main" in refused(Model({"kv": {"mian": TEXT}}), Pages())


def test_a_walk_that_may_be_served_whole_must_not_feed_anything():
    feeding = {**WALKS, "vit": Walk("vit", feeds=("codec",))}
    message = refused(Model({"kv": {"main": LAID}}, feeding), Pages())
    assert all(part in message for part in ("walk vit", "toy", "LLM", "codec", "kv"))


def test_a_single_text_span_may_feed_as_it_always_runs_its_last_token():
    check_declaration(Model(walk_of={**WALKS, "prefill": Walk("prefill", feeds=("codec",))}), [Pages()])


def test_with_the_cache_switched_off_nothing_is_cut_so_nothing_needs_to_be_skip_safe():
    check_declaration(Model(), [Pages(prefix_cache=False), Recurrent(), Positions(scheme="blocks")])


# -- what is opened


def test_b5_every_resource_is_offered_a_root_whatever_its_type(checkpoint):
    class Anything(Pages):
        pass

    pages, other = Pages(), Anything("something")
    open_caches(Model(path=checkpoint), [other, pages])
    assert [walks for _, walks in pages.opened] == [{"main": TEXT}]
    assert [walks for _, walks in other.opened] == [{}]


def test_a_model_that_declares_nothing_opens_and_logs_nothing(checkpoint, caplog):
    caplog.set_level(logging.DEBUG)
    pages = Pages()
    assert open_caches(Model({}, path=checkpoint), [pages]) == {}
    assert moved_root(Model({}, path=checkpoint), [pages], 1) == {}
    assert (pages.opened, pages.resets, caplog.records) == ([], [], [])


def test_pages_without_a_declared_stream_stay_shut(checkpoint):
    pages, spare = Pages(), Pages("spare")
    model = Model(labels={"kv": ("main",), "spare": ("main",)}, path=checkpoint)
    assert list(open_caches(model, [pages, spare])) == ["kv"]
    assert (len(pages.opened), spare.opened) == (1, [])


def test_opening_tells_labels_and_nodes_in_one_line(checkpoint, caplog):
    caplog.set_level(logging.INFO)
    open_caches(Model(path=checkpoint), [Pages(), Positions()])
    assert [r.getMessage() for r in caplog.records] == ["kv: pages of main are keyed on node LLM"]


def test_neither_checkpoint_nor_salt_stays_shut_with_one_line_naming_the_setting(caplog):
    caplog.set_level(logging.INFO)
    pages = Pages()
    assert open_caches(Model(), [pages, Positions()]) == {}
    assert (pages.opened, len(caplog.records)) == ([], 1)
    assert "prefix_cache_salt for kv" in caplog.text


def test_a_salt_opens_the_cache_of_a_model_without_a_checkpoint():
    pages = Pages(salt="mine")
    roots = open_caches(Model(), [pages])
    assert pages.opened == [(roots["kv"].root, {"main": TEXT})]


def test_a_cache_switched_off_logs_nothing(checkpoint, caplog):
    caplog.set_level(logging.DEBUG)
    open_caches(Model(path=checkpoint), [Pages(prefix_cache=False)])
    open_caches(Model(), [Pages(prefix_cache=False)])
    assert caplog.records == []


# -- the root


def root_of(path, *, preprocessing="Toy", rope=None, **fields):
    resources = [Pages(**fields), Positions(rope or {"rope_theta": 1e4}), Sampler(8)]
    return open_caches(Model(path=path, preprocessing=preprocessing), resources)["kv"].root


def test_the_same_build_twice_has_the_same_root(checkpoint):
    assert root_of(checkpoint) == root_of(checkpoint)


def test_b23_every_part_that_changes_kv_bytes_moves_the_root(checkpoint, tmp_path):
    roots = {
        "as it is": root_of(checkpoint),
        "rope_theta": root_of(checkpoint, rope={"rope_theta": 5e5}),
        "rope scaling": root_of(checkpoint, rope={"rope_theta": 1e4, "scaling": {"factor": 32}}),
        "page_size": root_of(checkpoint, page_size=32),
        "salt": root_of(checkpoint, salt="tenant"),
        "dtype": root_of(checkpoint, dtype="bfloat16"),
        "weights": root_of(write_checkpoint(tmp_path / "tuned", b"\x02" * 64)),
        "preprocessing": root_of(checkpoint, preprocessing="Toy2"),
    }
    assert len(set(roots.values())) == len(roots), roots


def test_a_pinned_hash_stands_for_the_weights(checkpoint, tmp_path):
    twin = write_checkpoint(tmp_path / "twin", b"\x02" * 64)
    a, b = Model(path=checkpoint), Model(path=twin)
    a.pinned_sha256 = b.pinned_sha256 = "ab" * 32
    assert open_caches(a, [Pages()]) == open_caches(b, [Pages()])


def test_the_named_fields_say_what_differs(checkpoint):
    resources = [Pages(page_size=32), Positions({"rope_theta": 5e5})]
    fields = open_caches(Model(path=checkpoint), resources)["kv"].fields
    assert (fields["page_size"], fields["positions.rope_theta"], fields["preprocessing"]) == ("32", "500000.0", "Toy")
    assert "weights" in fields


def test_weights_changed_in_place_drop_the_cache_and_move_the_root_each_time(checkpoint):
    model, pages = Model(path=checkpoint), Pages()
    opened = open_caches(model, [pages])["kv"]
    first, second = moved_root(model, [pages], 1)["kv"], moved_root(model, [pages], 2)["kv"]
    assert pages.resets == [("other_root: weights", first.root), ("other_root: weights", second.root)]
    assert len({opened.root, first.root, second.root}) == 3
    assert [k for k in opened.fields if opened.fields[k] != first.fields[k]] == ["weights"]


def test_weights_changed_in_place_leave_a_shut_cache_alone():
    pages = Pages()
    assert moved_root(Model(), [pages], 1) == {}
    assert pages.resets == []


# -- sizing


def sizing(caplog, limit):
    caplog.set_level(logging.INFO)
    report_sizing("kv", usable_pages=100, page_size=16, max_seq_len=320, max_concurrent_requests=limit)
    [record] = caplog.records
    assert "max_concurrent_requests" in record.getMessage()
    return record


def test_a_limit_whose_contexts_do_not_fit_the_pool_warns_with_one_that_does(caplog):
    record = sizing(caplog, 6)
    assert record.levelname == "WARNING"
    assert "max_concurrent_requests to 5" in record.getMessage()


@pytest.mark.parametrize("limit", [None, 5])
def test_no_limit_or_one_that_fits_is_one_line_of_advice(caplog, limit):
    record = sizing(caplog, limit)
    assert record.levelname == "INFO"
    assert "hold 5 contexts" in record.getMessage()
