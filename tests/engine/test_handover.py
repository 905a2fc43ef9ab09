"""Requests begun in one engine and finished in another."""

from __future__ import annotations

import pickle

import pytest
import torch.multiprocessing as mp

from kvlab.assemble import build_engine
from kvlab.engine.handover import DistributedTransport, LocalPeers
from kvlab.errors import InputError, KvlabError, StallError
from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel
from kvlab.spec import Chat, chat

PROMPT = [1 + i % 60 for i in range(23)]


def engine(make_transport=None, **settings):
    model = TracerModel(ToyProcessor(64))
    defaults = {"num_pages": 40, "page_size": 4, "attention": TracerAttention, "prefix_cache_salt": "test"}
    return build_engine(model, transport=make_transport, check_invariants=True, **(defaults | settings))


def pair(first=None, **settings):
    """Two engines; ``first`` are settings of the one, ``settings`` those of the other."""
    peers = LocalPeers()
    a = engine(lambda store: peers.join("a", store), **(first or {}))
    return a, engine(lambda store: peers.join("b", store), **settings)


def started(a, prompt=PROMPT, num_tokens=1, **options):
    handle = a.submit(prompt, **options)
    while len(handle._run.generated) < num_tokens:
        a.step()
    return handle


def begin(a, prompt=PROMPT, num_tokens=1, **options):
    handle = started(a, prompt, num_tokens, **options)
    return handle, a.hand_over(handle)


class Slow:
    """A transport whose reads never end."""

    source = "slow"

    def serve(self, holds):
        pass

    def read(self, source, src, dst, **place):
        return self

    def done(self):
        return False

    def wait(self):
        pass


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
    transport.read = lambda source, src, dst, **place: read.append(len(src)) or copy(source, src, dst, **place)
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


# -- what cannot be handed over


def test_a_request_whose_window_has_released_pages_is_not_handed_over():
    a, _ = pair()
    handle = started(a, num_tokens=3, max_tokens=20, window=(8, 0))
    with pytest.raises(InputError, match=r"its window has released \d+ tokens"):
        a.hand_over(handle)
    assert handle.result().ids == engine().generate(PROMPT, max_tokens=20, window=(8, 0)).ids


def test_a_window_that_has_released_nothing_yet_goes_along():
    a, b = pair()
    _, handed = begin(a, max_tokens=20, window=(20, 4))
    assert b.take_over(handed).result().ids == engine().generate(PROMPT, max_tokens=20, window=(20, 4)).ids


def test_on_token_cannot_hand_over_its_own_request():
    a, _ = pair()
    handle = a.submit(PROMPT, max_tokens=5, on_token=lambda chunk: a.hand_over(handle))
    with pytest.raises(InputError, match="on_token cannot hand over"):
        handle.result()


def test_on_token_may_take_over_what_another_engine_began():
    a, b = pair()
    _, handed = begin(a, max_tokens=9)
    taken = []
    b.generate([9] * 9, max_tokens=2, on_token=lambda chunk: taken or taken.append(b.take_over(handed)))
    assert list(taken[0].result().ids) == b.model.continuation(PROMPT, 9)


def test_a_preempted_request_that_is_prefilling_again_is_not_handed_over():
    a, b = pair({"max_step_tokens": 4, "admission": "none", "preemption": True, "num_pages": 12})
    older, newer = a.submit(PROMPT, max_tokens=20), a.submit([7] * 9, max_tokens=20)
    run = newer._run
    while not (run.preemptions and run.generated and run in a._running):
        a.step()
    with pytest.raises(InputError, match="computes its prompt again"):
        a.hand_over(newer)
    num_tokens = len(run.generated)
    while len(run.generated) == num_tokens:
        a.step()
    assert list(b.take_over(a.hand_over(newer)).result().ids) == b.model.continuation([7] * 9, 20)
    newer.cancel()
    assert list(older.result().ids) == a.model.continuation(PROMPT, 20)


def test_what_was_taken_over_and_not_read_yet_is_not_handed_on():
    a, b = pair()
    _, handed = begin(a, max_tokens=9)
    b.kv._remote._transport = Slow()
    other = b.take_over(handed)
    b._collect_prepared()
    b._start_waiting()
    with pytest.raises(InputError, match="its pages are not read yet"):
        b.hand_over(other)


# -- pages that went too early


def test_a_handed_over_request_that_is_cancelled_before_it_was_read_ends_with_an_error():
    a, b = pair({"num_pages": 12})
    handle, handed = begin(a, max_tokens=12)
    other = b.take_over(handed)
    handle.cancel()
    a.generate([9] * 30, max_tokens=4)  # writes other KV into those pages
    with pytest.raises(KvlabError, match="'a' has let go of the pages.*cancel it there only after"):
        other.result()
    b.check()
    assert b.kv.arena.num_free + len(b.kv.index) == b.kv.usable_pages
    assert list(b.generate(PROMPT, max_tokens=12).ids) == b.model.continuation(PROMPT, 12)


def test_an_engine_that_closed_cannot_be_read_any_more():
    a, b = pair()
    _, handed = begin(a, max_tokens=12)
    a.close()
    with pytest.raises(KvlabError, match="has let go of the pages"):
        b.take_over(handed).result()


# -- what rests and is never cancelled


@pytest.mark.parametrize("admission", ["reserve", "peak", "none"])
def test_a_request_that_cannot_start_beside_handed_over_ones_is_told_so(admission):
    a, b = pair({"num_pages": 10, "admission": admission})
    handle, handed = begin(a, max_tokens=12)
    waits = a.submit([9] * 24, max_tokens=4)
    with pytest.raises(StallError, match=r"6 of them held by 1 request that was handed over.*cancel\(\)"):
        waits.result()
    assert waits.outcome.finish_reason == "error"
    assert list(b.take_over(handed).result().ids) == b.model.continuation(PROMPT, 12)
    handle.cancel()
    assert list(a.generate([9] * 24, max_tokens=4).ids) == a.model.continuation([9] * 24, 4)


def test_behind_a_request_that_cannot_start_beside_handed_over_ones_others_do():
    a, _ = pair({"num_pages": 10})
    begin(a, max_tokens=12)
    large, small = a.submit([9] * 24, max_tokens=4), a.submit([3] * 4, max_tokens=4)
    assert list(small.result().ids) == a.model.continuation([3] * 4, 4)
    assert isinstance(large.outcome.error, StallError)


def test_a_handed_over_request_with_a_deadline_is_waited_for():
    a, _ = pair({"num_pages": 10})
    handle, _ = begin(a, max_tokens=12, deadline_steps=6)
    assert list(a.generate([9] * 24, max_tokens=4).ids) == a.model.continuation([9] * 24, 4)
    assert handle.outcome.finish_reason == "deadline"


@pytest.mark.parametrize("admission", ["reserve", "peak"])
def test_what_rests_reserves_no_more_than_it_holds(admission):
    a, _ = pair({"num_pages": 15, "admission": admission})
    begin(a, max_tokens=12)  # holds 6 of 14 pages, and would need 9 to end here
    assert list(a.generate([9] * 24, max_tokens=4).ids) == a.model.continuation([9] * 24, 4)


# -- what the reply is told


def test_logprobs_of_both_engines_are_in_the_result():
    options = {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": True}
    alone = engine().generate(PROMPT, **options)
    a, b = pair()
    _, handed = begin(a, num_tokens=5, **options)
    other = b.take_over(pickle.loads(pickle.dumps(handed)))
    result = other.result()
    assert (result.logprobs, result.prompt_logprobs) == (alone.logprobs, alone.prompt_logprobs)
    assert [chunk.logprob for chunk in other] == [entry["logprob"] for entry in alone.logprobs]


@pytest.mark.parametrize("prompt", [chat("1 2 3 4 5 6"), "1 2 3 4 5 6", [1, 2, 3, 4, 5, 6]])
def test_the_follow_up_of_what_was_handed_over_is_that_of_one_engine(prompt):
    alone = engine().generate(prompt, max_tokens=6)
    a, b = pair()
    _, handed = begin(a, prompt, num_tokens=2, max_tokens=6)
    result = b.take_over(pickle.loads(pickle.dumps(handed))).result()
    assert (result.request.prompt, result.prompt_ids) == (prompt, alone.prompt_ids)
    assert result.follow_up("7") == alone.follow_up("7")
    assert isinstance(result.follow_up("7"), Chat) == isinstance(prompt, Chat)


def test_k15_1_the_ids_of_a_chat_are_not_tokenised_anew_where_it_is_taken_over():
    a, b = pair()
    _, handed = begin(a, chat("1 2 3"), max_tokens=6)
    b.model.processor._ids = lambda prompt: [63] if isinstance(prompt, Chat) else list(prompt)  # another tokenizer
    result = b.take_over(handed).result()
    assert result.prompt_ids == (1, 2, 3)
    assert list(result.ids) == b.model.continuation([1, 2, 3], 6)


def test_a_prompt_of_ids_that_cannot_be_pickled_goes_as_its_ids():
    a, b = pair()
    _, handed = begin(a, (i for i in PROMPT), max_tokens=6)
    result = b.take_over(pickle.loads(pickle.dumps(handed))).result()
    assert list(result.ids) == b.model.continuation(PROMPT, 6)


# -- two processes


def side(rank: int, port: int, ending: str, results) -> None:
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
        handle, handed = begin(made, max_tokens=20)
        if ending == "cancelled":
            handle.cancel()
        results.put(pickle.dumps(handed))
        if ending == "killed":
            results.close()
            results.join_thread()
            os._exit(9)
        transport.close()  # answers until the other has said goodbye
        made.check()
    else:
        handed = pickle.loads(results.get())
        if ending == "killed":
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


def run_sides(ending: str):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=side, args=(rank, port, ending, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [9 if ending == "killed" else 0, 0]
    return results.get(timeout=10)


@pytest.mark.slow
def test_two_processes_hand_over_a_request():
    ids, _, after, cached, leaked = run_sides("read")
    right = TracerModel(ToyProcessor(64)).continuation(PROMPT, 20)
    assert (ids, after, leaked) == (right, right, 0)
    assert cached == 20


@pytest.mark.slow
def test_a_killed_peer_leaves_nothing_wrong_and_nothing_leaked():
    ids, error, after, cached, leaked = run_sides("killed")
    assert len(ids) == 1  # what it came with
    assert "could not be read from its peer" in error
    assert after == TracerModel(ToyProcessor(64)).continuation(PROMPT, 20)
    assert (cached, leaked) == (0, 0)


@pytest.mark.slow
def test_a_peer_that_has_cancelled_the_request_says_so_and_is_read_no_more():
    ids, error, after, _, leaked = run_sides("cancelled")
    assert len(ids) == 1
    assert "has let go of the pages" in error
    assert (after, leaked) == (TracerModel(ToyProcessor(64)).continuation(PROMPT, 20), 0)


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
