"""How many pages a set of requests will need at its worst moment, and whether they can all still finish.

A request's pages grow while it runs and come back when it ends. ``Footprint`` says how; ``peak_pages`` adds up a set of them;
``can_finish`` is the banker's question.

Source: Dijkstra, "Een algorithme ter voorkoming van de dodelijke omarming" (EWD-108), for ``can_finish``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Footprint:
    """Pages a request takes from the free list, over the rounds it has left.

    ``held_pages``: taken already. ``claim_pages``: the most it will ever hold. ``now_pages``: prompt pages it takes in its next
    steps. ``growth``: streams that grow by one slot a round. ``rounds``: rounds until it ends; 0 = it has ended and has not let
    go yet, so it counts for ever.
    """

    held_pages: int
    claim_pages: int
    now_pages: int
    growth: int
    rounds: int

    @property
    def owed_pages(self) -> int:
        """Pages it may still take."""
        return max(self.claim_pages - self.held_pages, 0)


def peak_pages(footprints: Sequence[Footprint], page_size: int) -> int:
    """Return the most pages the set holds at once.

    Usage peaks at once or just before a request ends, so only those rounds are looked at.

    >>> peak_pages([Footprint(2, 6, 0, 1, rounds=64), Footprint(0, 4, 4, 1, rounds=1)], page_size=16)
    6
    """
    if not footprints:
        return 0
    table = np.array([[f.held_pages, f.claim_pages, f.now_pages, f.growth, f.rounds] for f in footprints], dtype=np.int64)
    held, claim, now, growth, rounds = table.T[:, :, None]  # each [requests, 1]
    moments = np.unique(np.concatenate(([0], table[:, 4][table[:, 4] > 0] - 1)))[None, :]  # [1, moments]
    grown = held + now + growth * -(-moments // page_size)  # [requests, moments]
    usage = np.minimum(np.maximum(claim, held), np.where(rounds == 0, held + now, grown))
    running = (moments < rounds) | (rounds == 0)
    return int((usage * running).sum(axis=0).max())


def can_finish(footprints: Sequence[Footprint], free_pages: int) -> bool:
    """True when the requests can end one after another, each on what is free then and what earlier ones gave back.

    >>> can_finish([Footprint(3, 5, 0, 1, 9), Footprint(3, 4, 0, 1, 9)], free_pages=1)
    True
    >>> can_finish([Footprint(3, 5, 0, 1, 9), Footprint(3, 5, 0, 1, 9)], free_pages=1)
    False
    """
    for footprint in sorted(footprints, key=lambda f: f.owed_pages):
        if footprint.owed_pages > free_pages:
            return False
        free_pages += footprint.held_pages
    return True
