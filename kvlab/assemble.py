"""Joins a model, its pages, a backend and an engine: what ``kvlab.load`` does, and the same for a model made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import InputError
from kvlab.options import checks_invariants, plain, require_switch, require_text, whole
from kvlab.recorder import check_log_path
from kvlab.spec import check_salt

if TYPE_CHECKING:
    from kvlab.attention.base import AttentionBackend
    from kvlab.attention.store import KVStore
    from kvlab.cache.policies import EvictionPolicy
    from kvlab.engine.engine import Engine
    from kvlab.spec import KVLayout, ModelSpec, PageTransport

DEFAULT_NUM_PAGES = 2048
PROFILES = ("kvlab", "published")
ATTENTION = {
    "torch": "kvlab.attention.torch_paged:TorchPagedAttention",
    "flashinfer": "kvlab.attention.flashinfer:FlashInferAttention",
}


def load(
    name_or_path: str | Path,
    *,
    num_pages: int | None = None,
    pool_bytes: int | None = None,
    page_size: int = 16,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    record: bool = True,
    event_log: str | Path | None = None,
    max_seq_len: int | None = None,
    max_concurrent_requests: int | None = None,
    admission: str | None = None,
    admission_order: str = "fifo",
    backfill_protect: str = "easy",
    backfill_window: int = 128,
    preemption: bool | None = None,
    cpu_offload_pages: int = 0,
    host_tier_pages: int = 0,
    offload_policy: str = "lru",
    max_step_tokens: int = 2048,
    prefix_cache: bool = True,
    prefix_cache_salt: str = "",
    policy: str | EvictionPolicy = "lru",
    max_pinned_pages: int | None = None,
    attention: str = "torch",
    preprocess: str = "inline",
    encoder_cache_bytes: int = 256 << 20,
    profile: str = "kvlab",
    keying: str = "walk",
    check_invariants: bool | None = None,
    resources: Mapping[str, Mapping[str, Any]] | None = None,
) -> Engine:
    """Load a model by name or path and return an engine that runs it.

    Args:
        name_or_path: "smollm2-135m", "smollm2-135m@hub", "org/name" on the hub, a checkpoint folder, or a GGUF file. A folder
            with an llm_config.json is a BAGEL, which reads and draws pictures.
        num_pages: pages of the pool, page 0 (the sink) included; ``pool_bytes`` gives its size in bytes instead.
        page_size: KV slots a page.
        dtype: compute dtype: float32 (default on a CPU), bfloat16 (default on CUDA) or float64; ``kv_dtype`` of the pages.
        device: "cpu", "cuda" or "cuda:N"; CUDA when there is one.
        seed: of all sampling.
        record: keep events in bounded memory; ``event_log`` also writes them to a JSONL file.
        max_seq_len: longest context; the model's own when not given.
        max_concurrent_requests: most requests in flight.
        admission: "reserve" (a request starts when the pages of its whole life can be had), "peak" (when the worst moment of
            all lives together fits) or "none"; None = as ``profile`` has it.
        admission_order: "fifo", or "backfill": of the ``backfill_window`` requests behind the head those may go first that
            cannot delay it (``backfill_protect="easy"``).
        preemption: whether the newest request may be sent back for an older one's sake; None = unless admission is "none".
        cpu_offload_pages: host pages onto which a request may go, and come back, when an older one lacks pages;
            ``offload_policy`` says who goes first: "lru", the one that has not run for longest, or "priority", the one that
            holds most pages.
        host_tier_pages: host pages onto which cached pages go when they are evicted; a prompt is looked up there too.
        max_step_tokens: most prompt tokens computed in one step; longer prefills are chunked.
        prefix_cache: False = no page is ever reused. ``prefix_cache_salt`` isolates this deployment's pages.
        policy: order of eviction: arc, fifo, lfu, lru, priority, random, s3fifo, sieve or slru, or a policy object.
        max_pinned_pages: most pages that ``engine.pin`` may hold; None = half of the pool.
        attention: "torch" or "flashinfer".
        preprocess: where prompts are tokenised: "inline", "thread" or "process".
        encoder_cache_bytes: most memory for what encoders made of pictures; 0 keeps nothing.
        profile: "kvlab", or "published" for the published system's boundaries: nothing past a picture is reused, nor anything
            of a guided prompt.
        keying: "walk", or "ignore-walk" for a historical fault: keys name texts alone, so that a picture's pages are filed
            under those of a text. Results made with it are wrong on purpose and say so. For requests without guidance: a
            guided one that matches such pages ends with an error.
        check_invariants: check the pool after every change; None = as KVLAB_CHECK says.
        resources: per-resource overrides of the settings above, e.g. ``{"kv": {"page_size": 32}}``.

    Raises:
        InputError: an unknown or illegal option.
        LoadError: no such model, files that are damaged or not of a known kind, or too little memory (both numbers given).
        FetchError: weights neither here nor to be had; every place looked at is named.
    """
    from kvlab.models.loading import load_model

    _check_choices(profile, record, event_log)
    checks_invariants(check_invariants)
    model = load_model(name_or_path, dtype=dtype, device=device, max_seq_len=max_seq_len)
    return build_engine(
        model,
        num_pages=num_pages,
        pool_bytes=pool_bytes,
        page_size=page_size,
        kv_dtype=kv_dtype,
        seed=seed,
        record=record,
        event_log=event_log,
        max_concurrent_requests=max_concurrent_requests,
        admission=admission,
        admission_order=admission_order,
        backfill_protect=backfill_protect,
        backfill_window=backfill_window,
        preemption=preemption,
        cpu_offload_pages=cpu_offload_pages,
        host_tier_pages=host_tier_pages,
        offload_policy=offload_policy,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
        prefix_cache_salt=prefix_cache_salt,
        policy=policy,
        max_pinned_pages=max_pinned_pages,
        attention=attention,
        preprocess=preprocess,
        encoder_cache_bytes=encoder_cache_bytes,
        profile=profile,
        keying=keying,
        check_invariants=check_invariants,
        resources=resources,
    )


def _check_choices(profile: str, record: bool, event_log: str | Path | None) -> None:
    """Check what can be checked before weights are read."""
    if profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}; known are {', '.join(PROFILES)}")
    require_switch("record", record)
    if event_log is not None:
        check_log_path(event_log)


def build_engine(
    model: ModelSpec,
    *,
    num_pages: int | None = None,
    pool_bytes: int | None = None,
    page_size: int = 16,
    kv_dtype: str | None = None,
    seed: int = 0,
    record: bool = True,
    event_log: str | Path | None = None,
    max_concurrent_requests: int | None = None,
    admission: str | None = None,
    admission_order: str = "fifo",
    backfill_protect: str = "easy",
    backfill_window: int = 128,
    preemption: bool | None = None,
    cpu_offload_pages: int = 0,
    host_tier_pages: int = 0,
    offload_policy: str = "lru",
    max_step_tokens: int = 2048,
    prefix_cache: bool = True,
    prefix_cache_salt: str = "",
    policy: str | EvictionPolicy = "lru",
    max_pinned_pages: int | None = None,
    attention: str | Callable[[KVStore], AttentionBackend] = "torch",
    preprocess: str = "inline",
    encoder_cache_bytes: int = 256 << 20,
    profile: str = "kvlab",
    keying: str = "walk",
    check_invariants: bool | None = None,
    resources: Mapping[str, Mapping[str, Any]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    transport: Callable[[KVStore], PageTransport] | None = None,
) -> Engine:
    """Return an engine over a model that is already there.

    The arguments are those of ``load``; ``attention`` may also be a function of the KVStore, ``clock`` counts seconds, and
    ``transport`` makes of the KVStore what reads the pages of other engines.
    """
    from kvlab.attention.store import KVStore
    from kvlab.cache.kv import KVResource
    from kvlab.cache.misses import MissLog
    from kvlab.engine.chunks import ChunkRule
    from kvlab.engine.declare import report_sizing
    from kvlab.engine.engine import Engine
    from kvlab.engine.gate import AdmissionOptions, admission_of
    from kvlab.engine.positions import Positions
    from kvlab.engine.preprocess import PreprocessWorker
    from kvlab.recorder import Recorder

    _check_choices(profile, record, event_log)
    checks = checks_invariants(check_invariants)
    settings: dict[str, Any] = {
        "num_pages": num_pages,
        "pool_bytes": pool_bytes,
        "page_size": page_size,
        "kv_dtype": kv_dtype,
        "policy": policy,
        "max_pinned_pages": max_pinned_pages,
        "prefix_cache": prefix_cache,
        "prefix_cache_salt": prefix_cache_salt,
        "cpu_offload_pages": cpu_offload_pages,
        "host_tier_pages": host_tier_pages,
    }
    pool = {name: plain(value) for name, value in (settings | _overrides(resources, settings)).items()}
    usual = admission_of(profile)
    options = AdmissionOptions(
        admission=admission or usual.admission,
        admission_order=admission_order,
        backfill_protect=backfill_protect,
        backfill_window=plain(backfill_window),
        max_concurrent_requests=plain(max_concurrent_requests),
        preemption=usual.preemption if preemption is None else preemption,
    )
    chunks = ChunkRule(plain(max_step_tokens))
    _check_types(pool)
    layout = model.kv_layout(whole("page_size", pool["page_size"], 1), pool["kv_dtype"])
    pages = _num_pages(pool["num_pages"], pool["pool_bytes"], layout, model.device)
    host_pages = _host_pages(pool["cpu_offload_pages"], pool["host_tier_pages"], layout)
    streams = model.prefix_key_streams()
    worker = PreprocessWorker(model.processor, streams, {"kv": layout.page_size}, mode=preprocess, profile=profile)
    recorder = Recorder(clock=clock, log_path=event_log) if record or event_log is not None else None
    store = KVStore(layout, pages, device=model.device, host_pages=host_pages)
    kv = KVResource(
        layout,
        pages,
        store=store,
        policy=pool["policy"],
        max_pinned_pages=pool["max_pinned_pages"],
        prefix_cache=pool["prefix_cache"],
        salt=pool["prefix_cache_salt"],
        cpu_offload_pages=pool["cpu_offload_pages"],
        host_tier_pages=pool["host_tier_pages"],
        transport=None if transport is None else transport(store),
        check_invariants=checks,
        record=recorder,
        miss_log=MissLog(pages),
        keying=keying,
    )
    engine = Engine(
        model,
        kv=kv,
        attention=_attention(attention, store, model.num_heads),
        positions=Positions(model.rope_fields()),
        preprocess=worker,
        admission=options,
        chunks=chunks,
        recorder=recorder,
        clock=clock,
        seed=seed,
        offload_policy=offload_policy,
        profile=profile,
        encoder_cache_bytes=encoder_cache_bytes,
    )
    if kv.index is not None:
        report_sizing(
            "kv",
            usable_pages=kv.usable_pages,
            page_size=kv.page_size,
            max_seq_len=model.max_seq_len,
            max_concurrent_requests=options.max_concurrent_requests,
            cpu_offload_pages=pool["cpu_offload_pages"],
        )
    return engine


def _overrides(resources: Mapping[str, Mapping[str, Any]] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    shape = 'give {"kv": {...}}, a mapping of its settings, or None'
    if not isinstance(resources, Mapping | None):
        raise InputError(f"resources is {resources!r}; {shape}")
    for key, values in (resources or {}).items():
        if key != "kv":
            raise InputError(f"resources names {key!r}; the only resource with settings is 'kv'")
        if not isinstance(values, Mapping):
            raise InputError(f"resources has {values!r} for 'kv'; {shape}")
        for name in values:
            if name not in settings:
                raise InputError(f"unknown setting {name!r} of resource 'kv'; known are {', '.join(settings)}")
    return dict((resources or {}).get("kv", {}))


def _check_types(pool: Mapping[str, Any]) -> None:
    require_switch("prefix_cache", pool["prefix_cache"])
    require_text("prefix_cache_salt", pool["prefix_cache_salt"])
    check_salt("prefix_cache_salt", pool["prefix_cache_salt"])


def _num_pages(num_pages: int | None, pool_bytes: int | None, layout: KVLayout, device: str) -> int:
    """Pages of the pool from whichever of the two was given, checked against the memory that is there."""
    from kvlab.cache.kv import BYTES_PER_VALUE
    from kvlab.models.memory import check_memory

    if num_pages is not None and pool_bytes is not None:
        raise InputError(f"num_pages is {num_pages} and pool_bytes is {pool_bytes}; give one of the two")
    if layout.dtype not in BYTES_PER_VALUE:
        raise InputError(f"kv_dtype is {layout.dtype!r}; known are {', '.join(BYTES_PER_VALUE)}")
    page_bytes = layout.bytes_per_page(BYTES_PER_VALUE[layout.dtype])
    if pool_bytes is not None:
        num_pages = whole("pool_bytes", pool_bytes, 2 * page_bytes, f"two pages of {page_bytes} bytes") // page_bytes
    pages = whole("num_pages", DEFAULT_NUM_PAGES if num_pages is None else num_pages, 2, "the sink and one page to use")
    check_memory({"KV pages": pages * page_bytes}, device)
    return pages


def _host_pages(cpu_offload_pages: Any, host_tier_pages: Any, layout: KVLayout) -> int:
    """Host pages of the store, checked against the memory that is there."""
    from kvlab.cache.kv import BYTES_PER_VALUE
    from kvlab.models.memory import check_memory

    pages = whole("cpu_offload_pages", cpu_offload_pages, 0) + whole("host_tier_pages", host_tier_pages, 0)
    check_memory({"host pages": pages * layout.bytes_per_page(BYTES_PER_VALUE[layout.dtype])}, "cpu")
    return pages


def _attention(choice: str | Callable[[KVStore], AttentionBackend], store: KVStore, num_heads: int) -> AttentionBackend:
    if callable(choice):
        return choice(store)
    if choice not in ATTENTION:
        raise InputError(f"unknown attention {choice!r}; known are {', '.join(ATTENTION)}")
    module, _, name = ATTENTION[choice].partition(":")
    backend: AttentionBackend = getattr(import_module(module), name)(store, num_heads=num_heads)
    return backend
