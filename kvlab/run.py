"""What ``kvlab run`` and ``kvlab size`` do: a workload against an engine, and the pool a load needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.lab.playback import Player, failing_forwards
from kvlab.lab.sizing import size_pool
from kvlab.lab.workloads import WorkItem, WorkloadShape, make_workload

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult

TRACER = "tracer"


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
        output: results as JSONL, to go on from.

    Raises:
        InputError: an unknown workload, option or illegal number.
    """
    plain = WorkloadShape(**shape)
    make_workload(workload, plain)  # its name is checked before a model is loaded
    engine = _engine(model, engine_options, check)
    drawn = WorkloadShape(**(dict(shape) | {"vocab_size": engine.model.vocab_size}))
    verify = _is_right(engine) if check and model == TRACER else None
    faulty = failing_forwards(engine.model, drawn.faults, drawn.seed) if drawn.faults else nullcontext()
    with engine, faulty:
        player = Player(engine, verify=verify, check_every=64 if check else 0, output=output)
        items: Iterable[WorkItem] = make_workload(workload, drawn)
        return player.play(items, total=drawn.requests).as_dict()


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
    from kvlab.models.tracer import ToyProcessor, TracerAttention, TracerModel

    tracer = TracerModel(ToyProcessor(64), max_seq_len=max_seq_len)
    return build_engine(tracer, attention=TracerAttention, prefix_cache_salt=prefix_cache_salt, **options)


def _engine(model: str, options: Mapping[str, Any], check: bool) -> Engine:
    if model == TRACER:
        return tracer_engine(max_seq_len=1 << 16, prefix_cache_salt="kvlab run", **options)
    from kvlab.assemble import load

    return load(model, **options)


def _is_right(engine: Engine) -> Any:
    """Greedy results must be the tracer's own continuation; sampled ones must be what their seed gives without pages."""
    tracer: Any = engine.model

    def verify(result: GenerationResult) -> bool:
        if result.request.options.sampling.is_greedy:
            return list(result.ids) == tracer.continuation(list(result.prompt_ids), len(result.ids))
        return bool(result.ids == _sampled_alone(engine, result))

    return verify


def _sampled_alone(engine: Engine, result: GenerationResult) -> tuple[int, ...]:
    from kvlab.engine.sampler import Sampler
    from kvlab.spec import RequestConfig

    tracer: Any = engine.model
    sampler = Sampler(tracer.vocab_size, seed=engine.sampler.seed)
    sampler.ingest_request(result.rid, RequestConfig(sampling=result.request.options.sampling))
    known = list(result.prompt_ids)
    for _ in result.ids:
        (sampled,) = sampler.sample([result.rid], [tracer.next_logits(known)])
        if isinstance(sampled, Exception):
            raise sampled
        known.append(sampled.token)
    return tuple(known[len(result.prompt_ids) :])


def size(model: str, concurrency: int, context: int, shared: int, page_size: int) -> dict[str, Any]:
    """Pages and bytes of a pool under which no request waits, and the settings to put in.

    The network is not loaded: its configuration is enough.
    """
    from kvlab.cache.keys import require_page_size
    from kvlab.cache.kv import BYTES_PER_VALUE
    from kvlab.models.loading import default_dtype, open_checkpoint, torch_device
    from kvlab.models.textlm import TextConfig
    from kvlab.spec import KVLayout

    require_page_size(page_size)
    config = TextConfig.from_hf(open_checkpoint(model).config)
    dtype = default_dtype(torch_device(None))
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, dtype, dtype)
    pool = size_pool(
        layout, bytes_per_value=BYTES_PER_VALUE[dtype], concurrency=concurrency, context_tokens=context, shared_tokens=shared
    )
    return {
        "num_pages": pool.num_pages,
        "pool_bytes": pool.pool_bytes,
        "page_size": page_size,
        "dtype": dtype,
        "shared_pages": pool.shared_pages,
        "pages_per_request": pool.pages_per_request,
        "settings": pool.settings(),
    }
