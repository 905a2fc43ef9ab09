"""What ``kvlab run`` and ``kvlab size`` do: a workload against an engine, and the pool a load needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import __version__
from kvlab.errors import InputError
from kvlab.lab.playback import Player, failing_forwards
from kvlab.lab.result_file import ResultFile
from kvlab.lab.sizing import size_pool
from kvlab.lab.workloads import WORKLOADS, WorkloadShape, make_workload

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult
    from kvlab.models.tracer import TracerModel
    from kvlab.spec import KVLayout

TRACER = "tracer"
RUN_CONTEXT_TOKENS = 1 << 16  # of the tracer, whose own context nothing bounds


def play(
    workload: str,
    model: str,
    *,
    shape: Mapping[str, Any],
    engine_options: Mapping[str, Any],
    check: bool = False,
    output: Path | None = None,
) -> dict[str, Any]:
    """Play a workload against a new engine.

    Args:
        workload: a name of WORKLOADS, or the path of a JSONL file.
        model: "tracer", or what ``kvlab.load`` takes.
        shape: fields of WorkloadShape.
        engine_options: keywords of ``kvlab.load``.
        check: verify every invariant as it goes, and with the tracer every result.
        output: results as JSONL; what an earlier run of the same kind left there is not run again.

    Raises:
        InputError: an unknown workload, option or illegal number, a request that cannot be served, or results of another run.
        KvlabError: the disk is full, so that a result cannot be written.
    """
    plain = WorkloadShape(**shape)
    given = None if workload in WORKLOADS else list(make_workload(workload, plain))  # read whole before a model is loaded
    with _engine(model, engine_options) as engine, ExitStack() as opened:
        drawn = replace(plain, vocab_size=engine.model.vocab_size)
        results = None
        if output is not None:
            results = opened.enter_context(ResultFile(output, _identity(workload, engine, drawn, engine_options)))
        if drawn.faults:
            opened.enter_context(failing_forwards(engine.model, drawn.faults, drawn.seed))
        verify = _is_right(engine) if check and model == TRACER else None
        player = Player(engine, verify=verify, check_every=64 if check else 0, results=results)
        items = make_workload(workload, drawn) if given is None else given
        report = player.play(items, total=drawn.requests if given is None else len(given))
        engine.close()  # the end of the event log is written now
        report.log_error = engine.events.log_error
        return report.as_dict()


def _identity(workload: str, engine: Engine, shape: WorkloadShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the run it is; where its events go does not."""
    is_file = workload not in WORKLOADS
    return {
        "kvlab": __version__,
        "workload": sha256(Path(workload).read_bytes()).hexdigest() if is_file else workload,
        "model": engine.model.name,
        "weights": engine.model.identity,
        "shape": asdict(shape),
        "engine": {name: value for name, value in options.items() if name != "event_log"},
    }


def tracer_engine(*, max_seq_len: int = 4096, prefix_cache_salt: str = "tracer", **options: Any) -> Engine:
    """Return an engine that runs the tracer: no weights and no numerics, but real pages, whose every wrong reuse shows.

    Args:
        max_seq_len: longest context.
        prefix_cache_salt: stands for the weights that the tracer has not; without one nothing is cached.
        options: keywords of ``kvlab.load``.

    Raises:
        InputError: an unknown or illegal option.
    """
    from kvlab.assemble import build_engine
    from kvlab.models.tracer import TracerAttention

    return build_engine(_tracer(max_seq_len), attention=TracerAttention, prefix_cache_salt=prefix_cache_salt, **options)


def _tracer(max_seq_len: int) -> TracerModel:
    from kvlab.models.tracer import ToyProcessor, TracerModel

    return TracerModel(ToyProcessor(64), max_seq_len=max_seq_len)


def _engine(model: str, options: Mapping[str, Any]) -> Engine:
    if model == TRACER:
        return tracer_engine(max_seq_len=RUN_CONTEXT_TOKENS, prefix_cache_salt="kvlab run", **options)
    from kvlab.assemble import load

    return load(model, **options)


def _is_right(engine: Engine) -> Any:
    """A verifier: each token must be the one that the tracer, without pages, gives after all those before it."""
    tracer: Any = engine.model

    def verify(result: GenerationResult) -> bool:
        known = [*result.prompt_ids, *result.ids]
        logits = tracer.cold_logits(known[:-1], len(result.prompt_ids) - 1)[: len(result.ids)]
        if result.request.options.sampling.is_greedy:
            return tuple(logits.argmax(dim=-1).tolist()) == result.ids
        return _sampled_alone(engine, result, logits) == result.ids

    return verify


def _sampled_alone(engine: Engine, result: GenerationResult, logits: Any) -> tuple[int, ...]:
    """What the seed of a request draws from ``logits``, one row a token."""
    from kvlab.engine.sampler import Sampled, Sampler
    from kvlab.spec import RequestConfig

    sampler = Sampler(engine.model.vocab_size, seed=engine.sampler.seed)
    sampler.ingest_request(result.rid, RequestConfig(sampling=result.request.options.sampling))
    drawn = sampler.sample([result.rid] * len(logits), list(logits))
    return tuple(x.token for x in drawn if isinstance(x, Sampled))


def size(model: str, concurrency: int, context: int, shared: int, page_size: int) -> dict[str, Any]:
    """Pages and bytes of a pool under which no request waits, and the settings to put in.

    The network is not loaded: its configuration is enough.

    Raises:
        InputError: a number that cannot be, or a context longer than the model's.
    """
    from kvlab.cache.keys import require_page_size
    from kvlab.cache.kv import BYTES_PER_VALUE

    require_page_size(page_size)
    layout, longest = _layout(model, page_size)
    if context > longest:
        raise InputError(f"context is {context} tokens and the context of {model} is {longest}; ask for at most that")
    pool = size_pool(
        layout,
        bytes_per_value=BYTES_PER_VALUE[layout.dtype],
        concurrency=concurrency,
        context_tokens=context,
        shared_tokens=shared,
    )
    facts = {
        "num_pages": pool.num_pages,
        "pool_bytes": pool.pool_bytes,
        "page_size": page_size,
        "dtype": layout.dtype,
        "shared_pages": pool.shared_pages,
        "pages_per_request": pool.pages_per_request,
        "settings": pool.settings(),
    }
    if pool.shared_pages and concurrency > 1:
        facts["note"] = (
            f"loading warns that {concurrency} contexts do not fit: it does not know that they share a prefix, and until one "
            "request has left it in the cache they do not"
        )
    return facts


def _layout(model: str, page_size: int) -> tuple[KVLayout, int]:
    """How the pages of a model look, and its longest context."""
    if model == TRACER:
        tracer = _tracer(RUN_CONTEXT_TOKENS)
        return tracer.kv_layout(page_size), tracer.max_seq_len
    from kvlab.models.folders import is_bagel
    from kvlab.models.loading import default_dtype, find_model, open_checkpoint, torch_device
    from kvlab.models.textlm import TextConfig
    from kvlab.spec import KVLayout

    if is_bagel(find_model(model)[1]):
        raise InputError(f"{model} draws, and a pool for pictures is not sized by tokens; see kvlab doctor --model {model}")
    config = TextConfig.from_hf(open_checkpoint(model).config)
    dtype = default_dtype(torch_device(None))
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, dtype, dtype), config.max_seq_len
