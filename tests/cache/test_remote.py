"""Streams published to a peer and retrieved from one, between two KV resources."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from kv_driver import NODE, TEXT, Driver, step_of

from kvlab.attention.store import KVStore
from kvlab.cache.kv import KVResource
from kvlab.engine.handover import LocalPeers
from kvlab.errors import InputError
from kvlab.spec import AdmitRuntimeError, AllocationFailed, KVLayout, ReadPending, RequestConfig

PAGE = 16


class Side(Driver):
    """A pool that can read, and be read by, the others of its peers."""

    def __init__(self, name: str, peers: LocalPeers, num_pages: int = 12, root: bytes = b"root", **options) -> None:
        layout = options.pop("layout", KVLayout(1, 1, 2, PAGE))
        self.kv_store = KVStore(layout, num_pages, host_pages=8)
        transport = options.pop("transport", None) or peers.join(name, self.kv_store)
        kv = KVResource(layout, num_pages, store=self.kv_store, transport=transport, check_invariants=True, **options)
        kv.enable_prefix_cache(root, TEXT)
        super().__init__(kv, layout.page_size)

    def start(self, rid, ids) -> None:
        self.ingest(rid, ids)
        self.prefill(rid)

    def stamp(self, rid) -> None:
        for number, page in enumerate(self.kv.stream(rid).page_indices, 1):
            self.kv_store.pages[:, :, page] = float(number)

    def held(self, rid) -> list[float]:
        return self.kv_store.pages[0, 0, self.kv.stream(rid).page_indices, 0, 0, 0].tolist()

    def retrieve(self, rid, published):
        return self.kv.admit_retrieve(rid, NODE, "decode", published)


class Slow:
    """A transport whose reads end when the test says so."""

    def __init__(self) -> None:
        self.source = "slow"
        self.over, self.error = False, None

    def serve(self, holds):
        pass

    def read(self, source, src, dst, **place):
        return self

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True
        if self.error is not None:
            raise self.error


def pair(**options) -> tuple[Side, Side]:
    peers = LocalPeers()
    return Side("a", peers), Side("b", peers, **options)


def test_b8_own_records_do_not_freeze_the_tail():
    a, _ = pair()
    a.start("r", range(36))
    for token in range(30):
        assert a.retrieve("r", a.kv.publish("r")) is None
        a.sample("r", token)
        a.run("decode", {"r": 1})
    assert len(a.kv.index) == (36 + 30) // PAGE == 4


def test_b8_a_peers_record_freezes_it_even_if_nothing_is_read():
    a, b = pair()
    for side in (a, b):
        side.start("r", range(36))
    assert b.retrieve("r", a.kv.publish("r")) is None
    b.generate("r", range(31))
    assert b.kv.stored_tokens("r") == 66
    assert len(b.kv.index) == 2  # the prompt's whole pages
    a.generate("r", range(31))
    assert len(a.kv.index) == 4


def test_pages_arrive_and_the_prompt_is_filed_by_the_next_commit():
    a, b = pair()
    a.start("r", range(36))
    a.stamp("r")
    b.ingest("r", range(36))
    published = pickle.loads(pickle.dumps(a.kv.publish("r")))
    assert b.retrieve("r", published) is None
    assert (b.held("r"), b.kv.stored_tokens("r")) == ([1, 2, 3], 36)
    assert len(b.kv.index) == 0
    b.run("decode", {"r": 1})
    assert len(b.kv.index) == 2
    assert b.serve("local", range(36)) == 32


def test_a_local_match_saves_the_transfer():
    a, b = pair()
    a.start("r", range(36))
    a.stamp("r")
    b.start("before", range(36))
    b.kv_store.pages[:, :, b.kv.stream("before").page_indices] = 7.0
    b.kv.remove_request("before")
    b.ingest("r", range(36))
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert b.held("r") == [7, 7, 3]  # only the last page was read
    stream = b.kv.stream("r")
    assert (stream.hits, stream.converted, stream.chain.cursor) == (2, False, 2)


def test_a_local_match_is_not_one_key_short():
    a, b = pair()
    a.start("r", range(32))
    b.serve("before", range(32))
    a.kv._remote._transport = b.kv._remote._transport = None  # nothing may be read
    b.ingest("r", range(32))
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert b.kv.stored_tokens("r") == 32


def test_a_gates_lease_and_empty_pages_go_before_a_local_match():
    """B7."""
    a, b = pair()
    a.start("r", range(36))
    b.serve("before", range(36))
    b.ingest("r", range(36))
    b.kv.lease_prefix("r")
    b.kv._pool.grow(b.kv.stream("r"), 5, 0)
    assert b.retrieve("r", a.kv.publish("r")) is None
    b.kv.check()
    assert (len(b.kv.stream("r").page_indices), b.kv.stream("r").lease) == (3, None)


def test_an_own_record_that_claims_more_is_skipped_with_a_warning(caplog):
    a, _ = pair()
    a.start("r", range(36))
    published = a.kv.publish("r")
    a.kv.reset_request("r")
    a.kv.reset_prefix_cache()
    with caplog.at_level(logging.WARNING, logger="kvlab.cache"):
        assert a.retrieve("r", published) is None
    assert "claims 36 tokens and 0 are stored" in caplog.text
    assert a.kv.stored_tokens("r") == 0


def test_a_peer_that_began_anew_is_followed_to_its_new_beginning():
    a, b = pair()
    a.start("r", range(36))
    a.stamp("r")
    b.ingest("r", range(36))
    b.retrieve("r", a.kv.publish("r"))
    b.run("decode", {"r": 1})
    a.kv.reset_request("r", free=True)
    a.prompts["r"] = list(range(36))
    a.run("prefill", {"r": 20})
    a.kv_store.pages[:, :, a.kv.stream("r").page_indices] = 9.0
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert (b.kv.stored_tokens("r"), b.held("r")[:2], b.kv.stream("r").chain) == (20, [9, 9], None)
    b.run("prefill", {"r": 16})
    assert len(b.kv.index) == 2  # of the old epoch; nothing of the new one is keyed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 2}, "world size 1 was published and this side has 2"),
        ({"layout": KVLayout(1, 1, 2, 4)}, "layout"),
        ({"root": b"other"}, "root"),
    ],
)
def test_deployments_that_differ_are_refused_for_good(options, message):
    a, b = pair(**options)
    a.start("r", range(36))
    b.ingest("r", range(36))
    refusal = b.retrieve("r", a.kv.publish("r"))
    assert isinstance(refusal, AdmitRuntimeError)
    assert message in refusal.message
    assert b.kv.arena.num_free == b.kv.usable_pages


def test_k12_1_above_one_rank_the_cache_is_refused_in_words(caplog):
    with caplog.at_level(logging.INFO, logger="kvlab.cache"):
        _, b = pair(world_size=2)
    assert b.kv.index is None
    assert "stays shut: world size 2, and ranks would disagree" in caplog.text


def test_b28_above_one_rank_nothing_is_matched_so_ranks_cannot_differ():
    ranks = [Side("rank", LocalPeers(), num_pages=pages, world_size=2) for pages in (7, 8)]
    for rank in ranks:
        rank.serve("first", range(36))
        rank.ingest("r", range(36))
    assert [rank.probe("r") for rank in ranks] == [0, 0]


def test_a_pending_read_holds_the_request_and_a_finished_one_lets_it_go():
    a, _ = pair()
    slow = Slow()
    b = Side("b", LocalPeers(), transport=slow, cpu_offload_pages=8)
    a.start("r", range(36))
    b.ingest("r", range(36))
    assert b.retrieve("r", a.kv.publish("r")) == ReadPending("r")
    assert b.run("decode", {"r": 1}) == ReadPending("r")
    assert (b.kv.publish("r"), b.kv.offload("r"), b.probe("r")) == ({}, 0, 0)
    with pytest.raises(InputError, match="being read from a peer"):
        b.kv.release_oldest("r", 16)
    slow.over = True
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert b.run("decode", {"r": 1}).rows[0].length == 37


def test_a_failed_read_is_remembered_and_nothing_of_it_is_keyed():
    a, _ = pair()
    slow = Slow()
    b = Side("b", LocalPeers(), transport=slow)
    a.start("r", range(36))
    b.ingest("r", range(36))
    published = a.kv.publish("r")
    b.retrieve("r", published)
    slow.over, slow.error = True, ConnectionError("the peer was killed")
    for refusal in (b.retrieve("r", published), b.run("decode", {"r": 1}), b.retrieve("r", published)):
        assert isinstance(refusal, AdmitRuntimeError)
        assert "the peer was killed" in refusal.message
    assert (len(b.kv.index), b.kv.publish("r")) == (0, {})
    b.kv.remove_request("r")
    assert b.kv.arena.num_free == b.kv.usable_pages
    assert b.serve("other", range(36)) == 0


def test_a_rewind_forgets_a_failed_read():
    a, _ = pair()
    slow = Slow()
    slow.error = ConnectionError("gone")
    b = Side("b", LocalPeers(), transport=slow)
    a.start("r", range(36))
    b.ingest("r", range(36))
    b.retrieve("r", a.kv.publish("r"))
    b.kv.reset_request("r")
    assert slow.over  # it was waited for, so that no byte arrives later
    assert b.prefill("r") == {"r": 0}


def test_a_peer_that_left_cannot_be_read():
    peers = LocalPeers()
    a, b = Side("a", peers), Side("b", peers)
    a.start("r", range(36))
    b.ingest("r", range(36))
    peers.leave("a")
    assert "no peer 'a'" in b.retrieve("r", a.kv.publish("r")).message
    with pytest.raises(InputError, match="'b' already"):
        peers.join("b", b.kv_store)


def removed(a):
    a.kv.remove_request("r")


def rewound(a):
    a.kv.reset_request("r")


def begun_anew(a):
    a.kv.remove_request("r")
    a.start("r", [7] * 36)


def moved_to_other_pages(a):
    a.kv.offload("r")
    a.kv.reload("r")


def released(a):
    a.kv.release_oldest("r", 16)


@pytest.mark.parametrize("change", [removed, rewound, begun_anew, moved_to_other_pages, released])
def test_pages_that_their_peer_has_let_go_of_are_not_read(change):
    peers = LocalPeers()
    a, b = Side("a", peers, cpu_offload_pages=8, prefix_cache=False), Side("b", peers)
    a.start("r", range(36))
    b.ingest("r", range(36))
    published = a.kv.publish("r")
    change(a)
    assert "'a' has let go of the pages" in b.retrieve("r", published).message
    b.kv.remove_request("r")
    assert b.kv.arena.num_free == b.kv.usable_pages


def test_pages_of_a_stream_that_has_grown_are_still_read():
    a, b = pair()
    a.start("r", range(36))
    b.ingest("r", range(36))
    published = a.kv.publish("r")
    a.generate("r", range(30))
    a.stamp("r")
    assert b.retrieve("r", published) is None
    assert b.held("r") == [1, 2, 3]


def test_a_peer_that_was_resumed_is_followed_to_its_new_beginning():
    a, b = pair()
    a.start("r", range(36))
    b.ingest("r", range(36))
    b.retrieve("r", a.kv.publish("r"))
    a.kv.resume_request("r", RequestConfig())
    a.prompts["r"] = [7] * 20
    a.run("prefill", {"r": 20})
    a.kv_store.pages[:, :, a.kv.stream("r").page_indices] = 9.0
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert (b.kv.stored_tokens("r"), b.held("r")[:2]) == (20, [9, 9])


def test_without_room_nothing_is_read_until_there_is():
    a, b = pair(num_pages=5)
    a.start("r", range(36))
    a.stamp("r")
    b.start("taker", [9] * 36)
    b.ingest("r", range(36))
    published = a.kv.publish("r")
    assert isinstance(b.retrieve("r", published), AllocationFailed)
    assert b.kv.stored_tokens("r") == 0
    b.kv.remove_request("taker")
    assert b.retrieve("r", published) is None
    assert b.held("r") == [1, 2, 3]


def test_a_longer_record_is_read_from_where_this_side_is():
    a, b = pair()
    a.start("r", range(36))
    a.stamp("r")
    b.ingest("r", range(36))
    b.retrieve("r", a.kv.publish("r"))
    a.generate("r", range(30))
    a.stamp("r")
    b.kv_store.pages[:, :, b.kv.stream("r").page_indices[:2]] = 8.0
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert (b.held("r"), b.kv.stored_tokens("r")) == ([8, 8, 3, 4, 5], 65)


def test_streams_that_moved_or_are_on_the_host_are_not_published():
    peers = LocalPeers()
    a = Side("a", peers, cpu_offload_pages=8)
    a.start("r", range(36))
    assert set(a.kv.publish("r")) == {"main"}
    a.kv.offload("r")
    assert a.kv.publish("r") == {}
    a.kv.reload("r")
    a.kv.release_oldest("r", 16)
    assert a.kv.publish("r") == {}
    assert a.kv.publish("stranger") == {}
    step, ctx = step_of("decode", {"r": 1})
    assert a.kv.admit(step, ctx) is None
    a.kv.abort(step, ctx)


def test_an_unkeyed_stream_is_handed_over_too():
    peers = LocalPeers()
    a, b = (Side(name, peers, prefix_cache=False) for name in "ab")
    a.start("r", range(20))
    a.stamp("r")
    b.ingest("r", range(20))
    assert b.retrieve("r", a.kv.publish("r")) is None
    assert torch.tensor(b.held("r")).tolist() == [1, 2]
