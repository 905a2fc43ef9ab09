"""From logits to a token: one random stream per request, and a penalty that covers the tokens a hit skipped.

What a request draws depends on its seed and its own logits alone: not on the batch, the device or what else runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvlab.engine.sampling import SamplingParams as SamplingParams
from kvlab.errors import InputError, IntegrityError, KvlabError
from kvlab.options import is_whole, whole
from kvlab.spec import Match, RequestConfig, RequestId, Resource, WalkInputs

_FIRST_LOOK = 1024  # a draw nearly always ends among so many likeliest tokens; sorting 157k of them costs 23 ms


@dataclass(frozen=True)
class Sampled:
    """One token. Logprobs are those of the model's own distribution, before penalty, bias, temperature and truncation.

    ``top`` holds the n likeliest (id, logprob) in falling order; the sampled token may be one of them.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class _Request:
    """``seen`` [vocab] is kept only where a penalty reads it; ``skipped`` waits for the step that runs the rest.

    ``generated`` is kept only where ``params.allowed`` reads it.
    """

    params: SamplingParams
    draws: random.Random
    seen: Tensor | None
    skipped: set[int] = field(default_factory=set)
    generated: list[int] = field(default_factory=list)


class Sampler(Resource):
    """Chooses tokens for the requests of one engine.

    Args:
        vocab_size: length of every logits row.
        seed: of the engine; a request's stream hangs from it and from the request's seed, or else from how many came before.
    """

    key = "sampler"
    prefix_skip_safe: ClassVar[bool] = True

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        if not is_whole(seed):
            raise InputError(f"seed is {seed!r}; it must be a whole number")
        self.vocab_size, self.seed = whole("vocab_size", vocab_size, 1), int(seed)
        self._requests: dict[RequestId, _Request] = {}
        self._num_ingested = 0

    # -- a request's life

    def ingest_request(self, rid: RequestId, config: RequestConfig) -> None:
        if rid in self._requests:
            return
        params = SamplingParams() if config.sampling is None else config.sampling
        self._check_params(params)
        identity = ("request", self._num_ingested) if params.seed is None else ("seed", params.seed)
        # not torch.Generator: on a CPU it reads 32 bits of its seed, and this reads all of them
        digest = sha256(repr(("kvlab sampling", self.seed, *identity)).encode("utf-8")).digest()
        self._requests[rid] = _Request(params, random.Random(digest), self._empty_mask(params))
        self._num_ingested += 1

    def reset_request(self, rid: RequestId, free: bool = False) -> None:
        """Forget what was seen: it is observed again as it runs again. The random stream goes on where it was."""
        request = self._requests.get(rid)
        if request is not None:
            request.seen, request.skipped = self._empty_mask(request.params), set()

    def resume_request(self, rid: RequestId, config: RequestConfig) -> None:
        self.reset_request(rid)  # the random stream goes on where it was

    def remove_request(self, rid: RequestId) -> None:
        self._requests.pop(rid, None)

    def apply_cached_prefix(
        self, rid: RequestId, node: str, walk: str, inputs: WalkInputs, matches: Mapping[str, Match]
    ) -> None:
        request, match = self._request(rid), matches.get("main")
        if request.seen is not None and match is not None:
            request.skipped.update(inputs.ids.get("main", ())[: match.slots])  # of every walk until one of them runs

    def observe(self, rid: RequestId, ids: Sequence[int]) -> None:
        """Take note of the ids a step of ``rid`` ran that it did not sample, and of those the cache skipped before them.

        Raises:
            InputError: an id outside the vocabulary.
        """
        request = self._request(rid)
        if request.seen is None:
            return
        seen = [*request.skipped, *ids]
        wrong = next((i for i in seen if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise InputError(f"request {rid}: token id {wrong} is outside the vocabulary of {self.vocab_size}")
        request.seen[seen] = True
        request.skipped = set()

    def seen_ids(self, rid: RequestId) -> list[int]:
        """Ids the repetition penalty of ``rid`` covers, ascending; [] where there is no penalty."""
        seen = self._request(rid).seen
        return [] if seen is None else seen.nonzero().flatten().tolist()

    def publish(self, rid: RequestId) -> dict[str, Any]:
        """The random stream, and what was seen: a peer goes on with the tokens this one would have chosen."""
        request = self._request(rid)
        seen = [*self.seen_ids(rid), *request.skipped]
        return {"draws": request.draws.getstate(), "seen": seen, "generated": list(request.generated)}

    def admit_retrieve(self, rid: RequestId, node: str, walk: str, published: Mapping[str, Any]) -> None:
        if not published:
            return
        request = self._request(rid)
        request.draws.setstate(published["draws"])
        request.generated = list(published["generated"])
        self.observe(rid, published["seen"])

    # -- a step

    def sample(self, rids: Sequence[RequestId], logits: Sequence[Tensor]) -> list[Sampled | KvlabError]:
        """Choose one token a row, and count it as seen.

        A row that cannot be sampled gets its error in the list instead of a token, so that the others go on.

        Shapes:
            logits: one row [vocab] each, in the order of ``rids``.
        """
        requests = [self._request(rid) for rid in rids]
        if rids and all(r.params.is_plain_argmax for r in requests):
            return self._argmax(rids, logits)
        return [self._sample_row(rid, request, row) for rid, request, row in zip(rids, requests, logits, strict=True)]

    def adjusted(self, rid: RequestId, logits: Tensor) -> Tensor:
        """Return ``logits`` [vocab] after repetition penalty and bias, float64 on the CPU."""
        request = self._request(rid)
        x = logits.detach().to("cpu", torch.float64, copy=True)
        if request.seen is not None:
            seen = x[request.seen]  # [vocab] -> [seen ids]
            penalty = request.params.repetition_penalty
            x[request.seen] = torch.where(seen > 0, seen / penalty, seen * penalty)
        for token, value in request.params.logit_bias.items():
            x[token] += value
        return x

    def _argmax(self, rids: Sequence[RequestId], logits: Sequence[Tensor]) -> list[Sampled | KvlabError]:
        rows = torch.stack(list(logits))  # rows x [vocab] -> [rows, vocab]
        best, tokens = rows.max(dim=-1)  # the first of equals, hence the lowest id
        is_sound = best.isfinite() & rows.amin(dim=-1).isfinite()
        chosen = torch.where(is_sound, tokens, -1).tolist()
        return [Sampled(t) if t >= 0 else _unsound(rid, row) for rid, t, row in zip(rids, chosen, rows, strict=True)]

    def _sample_row(self, rid: RequestId, request: _Request, logits: Tensor) -> Sampled | KvlabError:
        x = self.adjusted(rid, logits)
        if not x.isfinite().all():
            return _unsound(rid, x)
        if request.params.allowed is not None:
            try:
                x = self._only_allowed(x, request.params.allowed(request.generated))
            except Exception as error:  # the client's own function: its request ends, the others go on
                return KvlabError(f"request {rid}: allowed() gave no ids to choose from: {error}")
        if request.params.is_greedy:
            token = int(x.argmax())
        else:
            scaled = (x - x.max()) / request.params.temperature  # the maximum first: a tiny temperature must not overflow
            token = draw(torch.softmax(scaled, dim=0), request.params, request.draws.random())
        if request.seen is not None:
            request.seen[token] = True
        if request.params.allowed is not None:
            request.generated.append(token)
        return Sampled(token, *self._logprobs(logits, token, request.params.logprobs))

    def _only_allowed(self, logits: Tensor, ranges: Sequence[range]) -> Tensor:
        kept = torch.full_like(logits, -torch.inf)
        for ids in ranges:
            if not ids or ids.step != 1 or ids.start < 0 or ids.stop > self.vocab_size:
                raise InputError(f"{ids!r} is no range of ids from 0 to {self.vocab_size - 1}")
            kept[ids.start : ids.stop] = logits[ids.start : ids.stop]
        if not ranges:
            raise InputError("it returned no range")
        return kept

    def _logprobs(self, logits: Tensor, token: int, count: int | None) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if count is None:
            return None, ()
        logprobs = torch.log_softmax(logits.detach().to("cpu", torch.float64), dim=0)
        values, ids = largest(logprobs, count)
        return float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))

    # -- what is kept

    def _request(self, rid: RequestId) -> _Request:
        try:
            return self._requests[rid]
        except KeyError:
            raise IntegrityError(f"the sampler does not know request {rid}; ingest it first") from None

    def _empty_mask(self, params: SamplingParams) -> Tensor | None:
        return None if params.repetition_penalty == 1 else torch.zeros(self.vocab_size, dtype=torch.bool)

    def _check_params(self, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InputError(f"sampling is {params!r}; give kvlab's SamplingParams")
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise InputError(f"logprobs is {params.logprobs}; the vocabulary has only {self.vocab_size} tokens")
        wrong = [token for token in params.logit_bias if token >= self.vocab_size]
        if wrong:
            raise InputError(f"logit_bias names token {wrong[0]}; the vocabulary ends at {self.vocab_size - 1}")

    def cleanup(self) -> None:
        self._requests.clear()


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first ``count`` of ``values`` [n] in falling order and their indices; equals stand in order of index.

    >>> [x.tolist() for x in largest(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 4)]
    [[3.0, 3.0, 3.0, 2.0], [1, 2, 4, 3]]
    """
    if count == 0:
        return values[:0], torch.arange(0)
    if count >= len(values):
        return values.sort(descending=True, stable=True)
    least = values.topk(count).values[-1]
    ids = (values >= least).nonzero().flatten()  # every equal of the last one, so that the cut below is by index
    ordered, order = values[ids].sort(descending=True, stable=True)
    return ordered[:count], ids[order][:count]


def draw(probs: Tensor, params: SamplingParams, uniform: float) -> int:
    """Return the token where the cumulative distribution of the kept tokens, likeliest first, passes ``uniform``.

    Shapes:
        probs: [vocab], float64, sums to 1.

    >>> probs = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    >>> [draw(probs, SamplingParams(temperature=1.0), u) for u in (0.0, 0.59, 0.61, 0.95)]
    [1, 1, 2, 0]
    >>> draw(probs, SamplingParams(temperature=1.0, top_k=2), 0.95)
    2
    """
    looked_at = min(max(_FIRST_LOOK, params.top_k + 1), len(probs))
    ids, kept, index = _invert(probs, looked_at, params, uniform)
    is_settled = kept < looked_at or (params.keeps_all and index < kept)
    if not is_settled:
        ids, kept, index = _invert(probs, len(probs), params, uniform)
    return int(ids[min(index, kept - 1)])  # rounding may leave the sum of the kept a hair below what was asked for


def _invert(probs: Tensor, count: int, params: SamplingParams, uniform: float) -> tuple[Tensor, int, int]:
    """Look at the ``count`` likeliest tokens: their ids, how many of them are kept, and where the draw falls among these."""
    values, ids = largest(probs, count)  # [vocab] -> [count]
    cumulative = values.cumsum(dim=0)
    kept = _num_kept(values, cumulative, params)
    mass = 1.0 if params.keeps_all else float(cumulative[kept - 1])
    return ids, kept, int(torch.searchsorted(cumulative[:kept], uniform * mass, right=True))


def _num_kept(values: Tensor, cumulative: Tensor, params: SamplingParams) -> int:
    """How many of the leading ``values`` [n], falling, top_k, top_p and min_p keep; n when the cut may lie beyond."""
    kept = len(values) if params.top_k == 0 else min(params.top_k, len(values))
    if params.top_p < 1:
        mass = 1.0 if params.top_k == 0 else float(cumulative[kept - 1])
        before = int(torch.searchsorted(cumulative[:kept], params.top_p * mass))  # tokens short of the mass
        kept = min(kept, before + 1)
    if params.min_p > 0:
        kept = min(kept, int((values >= params.min_p * values[0]).sum()))
    return kept


def prompt_logprobs(logits: Tensor, targets: Sequence[int]) -> list[float]:
    """Return the model's logprob of each target: row i of ``logits`` speaks about ``targets[i]``.

    A prompt's first token has no row before it; its logprob is undefined and not among these. Each row is computed alone, so
    that the values do not depend on how the prompt was cut into chunks.

    Shapes:
        logits: [len(targets), vocab].
    """
    if len(logits) != len(targets):
        raise InputError(f"{len(logits)} rows of logits for {len(targets)} prompt tokens; give one row a token")
    rows = zip(logits, targets, strict=True)
    return [float(torch.log_softmax(row.to("cpu", torch.float64), dim=0)[target]) for row, target in rows]


def _unsound(rid: RequestId, logits: Tensor) -> KvlabError:
    count = int((~logits.isfinite()).sum())
    return KvlabError(
        f"request {rid}: {count} of {len(logits)} logits are NaN or infinite, so no token can be chosen; "
        "look for an overflow in the weights or the dtype"
    )
