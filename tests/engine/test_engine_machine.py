"""A whole engine under pressure, in seeded random order: after each operation every invariant holds, every reply is the one
that a run without pages gives, and in the end nothing is left over.

The machines of tests/cache fuzz the verbs of a pool; here the engine calls them: gate, preemption, host pages and faults.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random
from typing import Any, ClassVar

import pytest

from kvlab.assemble import build_engine
from kvlab.cache.policies import POLICIES
from kvlab.cache.policies.belady import Belady
from kvlab.cache.policies.priority import Priority
from kvlab.engine.sampler import Sampler
from kvlab.errors import InputError, StallError
from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel
from kvlab.spec import RequestConfig, Retention

PAGE = 4
NUM_PAGES = 25
HOST_PAGES = 10
VOCAB = 16
ADMISSIONS = ("reserve", "peak", "none")
COMBINATIONS = [*product(sorted(POLICIES), ("host", "device"), ADMISSIONS)]
SLOW_OPERATIONS = -(-200_000 // len(COMBINATIONS))


class FlakyTracer(TracerModel):
    """A tracer whose next forward raises when it is told so."""

    fails_next = False

    def forward(self, walk, rows, attention):
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("a fault put in on purpose")
        return super().forward(walk, rows, attention)


class Machine:
    """One engine, what is under way on it, and how often what happened."""

    OPERATIONS: ClassVar[dict[str, float]] = {
        "step": 50,
        "submit": 20,
        "follow_up": 5,
        "cancel": 4,
        "step_that_fails": 3,
        "evict": 2,
        "pin": 1,
        "unpin": 1,
        "reset": 0.3,
        "change_weights": 0.3,
    }

    def __init__(self, policy: str, tiers: str, admission: str) -> None:
        self.draw = Random(f"{policy} {tiers} {admission}")
        self.seen: Counter[str] = Counter()
        self.under_way: list[tuple[Any, int]] = []  # with the weights that were there when it was submitted
        self.ended: list[Any] = []
        self.model = FlakyTracer(ToyProcessor(VOCAB), max_seq_len=4 * NUM_PAGES)
        self.trunks = [[self.draw.randrange(VOCAB) for _ in range(20)] for _ in range(3)]
        made = {"belady": lambda: Belady([]), "priority": lambda: Priority(clock=lambda: float(self.seen["step"]))}
        is_hosted = tiers == "host"
        self.engine = build_engine(
            self.model,
            attention=TracerAttention,
            prefix_cache_salt="machine",
            page_size=PAGE,
            num_pages=NUM_PAGES,
            admission=admission,
            admission_order=self.draw.choice(["fifo", "backfill"]),
            policy=made[policy]() if policy in made else policy,
            cpu_offload_pages=HOST_PAGES if is_hosted else 0,
            host_tier_pages=HOST_PAGES if is_hosted else 0,
            max_step_tokens=24,
            check_invariants=False,
        )

    def run(self, num_operations: int) -> None:
        names, weights = zip(*self.OPERATIONS.items(), strict=True)
        for name in self.draw.choices(names, weights, k=num_operations):
            getattr(self, name)()
            self.engine.check()
            self.look_at_what_ended()

    # -- operations

    def step(self) -> None:
        try:
            self.seen["step"] += 1
            self.engine.step()
        except StallError:
            self.seen["stalled"] += 1
            assert self.engine._gate.options.admission == "none"

    def step_that_fails(self) -> None:
        self.model.fails_next = True
        self.step()
        self.model.fails_next = False

    def submit(self) -> None:
        trunk = self.draw.choice(self.trunks)
        self.ask(
            [
                *trunk[: self.draw.randrange(len(trunk) + 1)],
                *(self.draw.randrange(VOCAB) for _ in range(self.draw.randrange(1, 9))),
            ]
        )

    def follow_up(self) -> None:
        if self.ended:
            before = self.draw.choice(self.ended[-4:])
            self.ask([*before.prompt_ids, *before.ids, self.draw.randrange(VOCAB)])

    def ask(self, ids: list[int]) -> None:
        if len(self.under_way) < 12 and len(ids) < 60:
            self.under_way.append((self.engine.submit(ids, **self.options(len(ids))), self.model.seed))

    def options(self, prompt_tokens: int) -> dict[str, Any]:
        """Mostly plain, sometimes with one thing that is not."""
        odd: list[dict[str, Any]] = [
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "repetition_penalty": 1.3},
            {"prefix_cache": False},
            {"salt": "another"},
            {"deadline_steps": self.draw.randrange(2, 30)},
            {"window": (self.draw.randrange(1, 9), 0)},
            {"prompt_logprobs": True},
        ]
        if self.engine.kv.index is not None and self.engine.kv.index.policy.name == "priority":
            odd += [{"retention": (Retention(0, min(8, prompt_tokens), 80, 20.0),)}] * 3
        chosen = self.draw.choice(odd) if self.draw.random() < 0.4 else {}
        return {"max_tokens": self.draw.randrange(0, 14), "seed": self.draw.randrange(1000), **chosen}

    def cancel(self) -> None:
        if self.under_way:
            self.draw.choice(self.under_way)[0].cancel()

    def evict(self) -> None:
        if self.engine._gate.can_spare(()):
            self.engine.kv.evict(self.draw.randrange(1, 4))

    def pin(self) -> None:
        try:
            self.engine.pin(self.draw.choice(self.trunks)[:8], name=self.draw.choice("pq"))
            self.seen["pinned"] += 1
        except (InputError, StallError):
            self.seen["not pinned"] += 1

    def unpin(self) -> None:
        for name in self.engine.kv.pins.by_name():
            self.engine.unpin(name)

    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    def change_weights(self) -> None:
        self.model.seed += 1

    # -- what must hold

    def look_at_what_ended(self) -> None:
        for handle, weights in [entry for entry in self.under_way if entry[0].done]:
            self.under_way.remove((handle, weights))
            result = handle.outcome
            self.seen[result.finish_reason] += 1
            self.seen["hits"] += result.cached_tokens > 0
            self.seen["preemptions"] += result.preemptions
            self.seen["offloads"] += result.offloads
            if weights == self.model.seed and result.request.options.window is None:
                assert list(result.ids) == self.alone(result), f"{result.request} is not what a run without pages gives"
                self.seen["compared"] += 1
                self.ended.append(result)

    def alone(self, result: Any) -> list[int]:
        """The first tokens of its reply, as many as it has, without any pages."""
        known = [*result.prompt_ids, *result.ids]
        logits = self.model.cold_logits(known[:-1], len(result.prompt_ids) - 1)[: len(result.ids)] if result.ids else []
        sampler = Sampler(VOCAB, seed=self.engine.sampler.seed)
        sampler.ingest_request(1, RequestConfig(sampling=result.request.options.sampling))
        sampler.observe(1, result.prompt_ids)
        return [sampler.sample([1], [row])[0].token for row in logits]

    def finish(self) -> None:
        """End everything: nothing may be left over."""
        for handle, _ in self.under_way:
            handle.cancel()
        self.look_at_what_ended()
        self.unpin()
        kv = self.engine.kv
        assert kv.arena.num_free + len(kv.index) == kv.usable_pages
        assert self.engine.reset_prefix_cache()
        assert kv.arena.num_free == kv.usable_pages
        if kv._pool.host is not None and kv._pool.tier is not None:
            assert (kv._pool.host.num_free, kv._pool.tier.host.num_free) == (HOST_PAGES, HOST_PAGES)
        self.engine.check()
        self.engine.close()


@pytest.mark.parametrize(("policy", "tiers", "admission"), COMBINATIONS)
def test_every_combination_survives_a_short_while(policy, tiers, admission):
    machine = Machine(policy, tiers, admission)
    machine.run(60)
    machine.finish()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "tiers", "admission"), COMBINATIONS)
def test_every_combination_survives_200_000_operations_together(policy, tiers, admission):
    machine = Machine(policy, tiers, admission)
    machine.run(SLOW_OPERATIONS)
    machine.finish()
    happened = ["length", "error", "cancelled", "deadline", "hits", "compared", "pinned"]
    assert [name for name in happened if not machine.seen[name]] == []
    counters = machine.engine.kv.counters
    assert counters.matched_pages > 100
    if tiers == "host":
        assert counters.host_hits > 0
    if tiers == "host" and admission == "none":
        assert counters.offloads > 0
