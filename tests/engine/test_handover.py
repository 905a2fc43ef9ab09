"""Requests begun in one engine and finished in another."""

from __future__ import annotations

import pickle

import pytest
import torch.multiprocessing as mp

from kvlab.assemble import build_engine
from kvlab.engine.handover import DistributedTransport, LocalPeers
from kvlab.errors import InputError, KvlabError
from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel

PROMPT = [1 + i % 60 for i in range(23)]


def engine(make_transport=None, **settings):
    model = TracerModel(ToyProcessor(64))
    defaults = {"num_pages": 40, "page_size": 4, "attention": TracerAttention, "prefix_cache_salt": "test"}
    return build_engine(model, transport=make_transport, check_invariants=True, **(defaults | settings))


def pair(**settings):
    peers = LocalPeers()
    a = engine(lambda store: peers.join("a", store))
    return a, engine(lambda store: peers.join("b", store), **settings)


def begin(a, prompt=PROMPT, **options):
    handle = a.submit(prompt, **options)
    while not handle._run.generated:
        a.step()
    return handle, a.hand_over(handle)


def test_the_reply_equals_a_run_in_one_engine():
    a, b = pair()
    handle, handed = begin(a, max_tokens=20)
    other = b.take_over(pickle.loads(pickle.dumps(handed)))
    b.step()
    handle.cancel()
    result = other.result()
    assert list(result.ids) == b.model.continuation(PROMPT, 20)
    assert [chunk.token for chunk in other._run.chunks] == list(result.ids)
    assert len(b.events.filter(rid=result.rid)) > 0
    for side in (a, b):
        side.check()
        assert side.kv.arena.num_free + len(side.kv.index) == side.kv.usable_pages


def test_what_the_decode_engine_has_cached_is_not_read_again():
    a, b = pair()
    b.generate(PROMPT, max_tokens=1)
    read = []
    transport = b.kv._remote._transport
    copy = transport.read
    transport.read = lambda source, src, dst: read.append(len(src)) or copy(source, src, dst)
    _, handed = begin(a, max_tokens=9)
    assert list(b.take_over(handed).result().ids) == b.model.continuation(PROMPT, 9)
    assert read == [1]  # the last, partial page


def test_sampled_replies_go_on_with_the_same_draws_and_penalties():
    options = {"max_tokens": 20, "temperature": 1.0, "repetition_penalty": 1.3, "seed": 5}
    alone = engine().generate(PROMPT, **options)
    a, b = pair()
    _, handed = begin(a, **options)
    assert b.take_over(handed).result().ids == alone.ids


def test_a_resting_request_does_not_run_on_and_its_pages_stay():
    a, b = pair()
    handle, handed = begin(a, max_tokens=20)
    for _ in range(5):
        a.step()
    assert len(handle._run.generated) == len(handed.generated) == 1
    assert list(b.take_over(handed).result().ids) == b.model.continuation(PROMPT, 20)
    handle.cancel()
    assert handle.outcome.finish_reason == "cancelled"


@pytest.mark.parametrize("admission", ["reserve", "peak", "none"])
def test_many_are_handed_over_side_by_side(admission):
    a, b = pair(admission=admission, num_pages=14, preemption=True)
    prompts = [[*PROMPT, i] for i in range(5)]
    begun = [begin(a, prompt, max_tokens=9) for prompt in prompts]
    others = [b.take_over(handed) for _, handed in begun]
    assert [list(o.result().ids) for o in others] == [b.model.continuation(prompt, 9) for prompt in prompts]
    for handle, _ in begun:
        handle.cancel()
    a.check()
    b.check()


def test_a_request_whose_pages_are_gone_ends_with_an_error_and_the_rest_goes_on():
    peers = LocalPeers()
    a, b = (engine(lambda store, name=name: peers.join(name, store)) for name in "ab")
    _, handed = begin(a, max_tokens=9)
    peers.leave("a")
    lost, fine = b.take_over(handed), b.submit([9] * 9, max_tokens=9)
    with pytest.raises(KvlabError, match="no peer 'a'"):
        lost.result()
    assert list(fine.result().ids) == b.model.continuation([9] * 9, 9)
    assert b.kv.arena.num_free + len(b.kv.index) == b.kv.usable_pages
    assert list(b.generate(PROMPT, max_tokens=9).ids) == b.model.continuation(PROMPT, 9)


def test_only_a_running_request_with_a_token_can_be_handed_over():
    a, _ = pair()
    handle = a.submit(PROMPT, max_tokens=3)
    with pytest.raises(InputError, match="has no token"):
        a.hand_over(handle)
    handle.result()
    with pytest.raises(InputError, match="not running"):
        a.hand_over(handle)


# -- two processes


def side(rank: int, port: int, is_killed: bool, results) -> None:
    """Rank 0 prefills and hands over, rank 1 goes on."""
    import os
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    made = engine(lambda store: DistributedTransport(store, 1 - rank))
    transport = made.kv._remote._transport
    if rank == 0:
        _, handed = begin(made, max_tokens=20)
        results.put(pickle.dumps(handed))
        if is_killed:
            results.close()
            results.join_thread()
            os._exit(9)
        transport.close()  # answers until the other has said goodbye
        made.check()
    else:
        handed = pickle.loads(results.get())
        if is_killed:
            time.sleep(1.0)  # until it is really gone
        taken = made.take_over(handed)
        while not taken.done:
            made.step()
        outcome = taken.outcome
        after = made.generate(PROMPT, max_tokens=20)
        made.check()
        leaked = made.kv.usable_pages - made.kv.arena.num_free - len(made.kv.index)
        results.put((list(outcome.ids), str(outcome.error), list(after.ids), after.cached_tokens, leaked))
        transport.close()
    results.close()


def run_sides(is_killed: bool):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=side, args=(rank, port, is_killed, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [9 if is_killed else 0, 0]
    return results.get(timeout=10)


@pytest.mark.slow
def test_two_processes_hand_over_a_request():
    ids, _, after, cached, leaked = run_sides(is_killed=False)
    right = TracerModel(ToyProcessor(64)).continuation(PROMPT, 20)
    assert (ids, after, leaked) == (right, right, 0)
    assert cached == 20


@pytest.mark.slow
def test_a_killed_peer_leaves_nothing_wrong_and_nothing_leaked():
    ids, error, after, cached, leaked = run_sides(is_killed=True)
    assert len(ids) == 1  # what it came with
    assert "could not be read from its peer" in error
    assert after == TracerModel(ToyProcessor(64)).continuation(PROMPT, 20)
    assert (cached, leaked) == (0, 0)


def test_what_was_handed_over_is_not_waited_for_here():
    a, b = pair()
    handle, handed = begin(a, max_tokens=5)
    with pytest.raises(InputError, match="was handed over and does not go on here"):
        handle.result()
    with pytest.raises(InputError, match="was handed over"):
        list(handle)
    assert len(b.take_over(handed).result().ids) == 5
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
