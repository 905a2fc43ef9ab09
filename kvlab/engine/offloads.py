"""Requests that make room: who goes to the host when another lacks pages, and when it comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.cache.kv import KVResource
from kvlab.engine.gate import Claim, Gate
from kvlab.engine.run import Run
from kvlab.errors import InputError
from kvlab.spec import AllocationFailed, Refusal

OFFLOAD_POLICIES = ("lru", "priority")


class Offloads:
    """Parks runs on host pages and brings them back.

    Only a run admitted later than the one in need is parked, so that the oldest always goes on; and a parked run comes back
    when the pages of its whole life can be had, so that it is not parked again at once.

    Args:
        running: every admitted run in the order of admission, parked ones included; read, never changed.
        claim: what a run will hold until its end.
        policy: who goes first: "lru", the one that has not run for longest, or "priority", the one that holds most pages. Of
            equals the newest.

    Raises:
        InputError: an unknown policy.
    """

    def __init__(
        self, kv: KVResource, gate: Gate, running: Sequence[Run], claim: Callable[[Run], Claim], *, policy: str = "lru"
    ) -> None:
        if policy not in OFFLOAD_POLICIES:
            raise InputError(f"offload_policy is {policy!r}; it must be one of {', '.join(OFFLOAD_POLICIES)}")
        self._kv, self._gate, self._running, self._claim, self._policy = kv, gate, running, claim, policy

    @property
    def parked(self) -> list[Run]:
        """Runs on the host, in the order in which they come back."""
        return [run for run in self._running if run.is_parked]

    def make_room(self, refusal: Refusal) -> bool:
        """Park one run for the sake of the refused one; False when there is none to park."""
        if not isinstance(refusal, AllocationFailed) or not self._kv.supports_eviction():
            return False
        for victim in self._victims(refusal):
            self._kv.offload(victim.rid)
            if self._kv.is_offloaded(victim.rid):
                victim.is_parked = True
                victim.offloads += 1
                self._gate.release(victim.rid)
                return True
        return False

    def _victims(self, refusal: AllocationFailed) -> list[Run]:
        place = next(i for i, run in enumerate(self._running) if run.rid == refusal.rid)
        younger = [(run, self._kv.get_offload_priority(run.rid)) for run in reversed(self._running[place + 1 :])]
        able = [(run, pages) for run, pages in younger if pages and not run.rests]
        if self._policy == "priority":
            able.sort(key=lambda entry: -entry[1])  # a stable sort: the newest of equals stays first
        else:
            able.sort(key=lambda entry: entry[0].last_ran_round)
        return [run for run, _ in able]

    def bring_back(self) -> None:
        """Reload parked runs, the oldest first, as long as they fit."""
        for run in self.parked:
            if not self._gate.take_back(self._claim(run)):
                return
            if not self._kv.reload(run.rid):
                self._gate.release(run.rid)
                return
            run.is_parked = False
