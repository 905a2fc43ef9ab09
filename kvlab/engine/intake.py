"""From a prepared prompt to a request every resource knows: schedule, stop ids, and the refusals that need no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvlab.cache.kv import KVResource
from kvlab.engine.gate import Claim
from kvlab.engine.preprocess import Prepared
from kvlab.engine.request import RequestOptions
from kvlab.engine.run import Run
from kvlab.engine.text import TextStream
from kvlab.errors import InputError
from kvlab.spec import ModelSpec, RequestConfig, Resource


class Intake:
    """Fills in a run once the worker has delivered its prompt."""

    def __init__(self, model: ModelSpec, kv: KVResource, resources: Sequence[Resource]) -> None:
        self._model, self._kv, self._resources = model, kv, tuple(resources)

    def prepare(self, run: Run, prepared: Prepared) -> None:
        """Complete ``run`` and tell every resource about it.

        Raises:
            InputError: the request overflows the context, or could never fit the pool; no resource has heard of it then.
        """
        options = run.request.options
        run.record, run.prompt_ids = prepared.record, tuple(self._main_ids(prepared))
        run.input_tokens = len(run.prompt_ids)
        self._check_fits(run, options)
        run.schedule = self._model.schedule(prepared.record, options.max_tokens)
        own_stops = () if options.ignore_eos else self._model.processor.stop_ids
        run.stop_ids = frozenset((*options.stop_ids, *own_stops))
        run.text = TextStream(self._model.processor.decode, options.stop)
        self._ingest(run, prepared)
        run.prepared = True

    def send_back(self, run: Run, prepared: Prepared) -> None:
        """Let ``run`` begin anew with ``prepared``: its prompt and what it has generated."""
        misses = [miss for resource in self._resources for miss in resource.cached_misses(run.rid)]
        for resource in self._resources:
            resource.resume_request(run.rid, _config(prepared, resource, run.request.options))
        run.send_back(replace(prepared.record, fork=run.record.fork), misses)

    def claim(self, run: Run) -> Claim:
        """What ``run`` will hold until its end."""
        tokens = run.request.options.max_tokens - (run.input_tokens - len(run.prompt_ids))
        slots = self._model.slots(run.record, tokens)
        prompt_pages = sum(self._kv.pages_needed(prompt) for prompt, _ in slots.values())
        window, own_pages = run.request.options.window_policy, 0
        if window is not None:
            most = window.most_tokens(self._kv.page_size)
            kept_pages = window.protected_prefix // self._kv.page_size
            own_pages = sum(max(self._kv.pages_needed(min(end, most)) - kept_pages, 0) for _, end in slots.values())
            # the prompt is held whole until the first token; then the window has let go of what it does not keep
            slots = {
                label: (prompt, min(end, max(most, 0 if run.generated else prompt))) for label, (prompt, end) in slots.items()
            }
        total_pages = sum(self._kv.pages_needed(end) for _, end in slots.values())
        growth = sum(end > prompt for prompt, end in slots.values())
        return Claim(run.rid, total_pages, prompt_pages, growth, own_pages)

    def _ingest(self, run: Run, prepared: Prepared) -> None:
        try:
            for resource in self._resources:
                resource.ingest_request(run.rid, _config(prepared, resource, run.request.options))
        except Exception:
            for resource in self._resources:  # one of them refused: none may remember the request
                resource.remove_request(run.rid)
            raise

    def _main_ids(self, prepared: Prepared) -> Sequence[int]:
        streams = self._model.prefix_key_streams().get(self._kv.key, {})
        tensor = streams["main"].tensor if "main" in streams else next(iter(prepared.record.tensors))
        return prepared.record.tensors[tensor]

    def _check_fits(self, run: Run, options: RequestOptions) -> None:
        prompt_tokens = len(run.prompt_ids)
        total, context = prompt_tokens + options.max_tokens, self._model.max_seq_len
        if total > context:
            raise InputError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {options.max_tokens}: {total} together, and the "
                f"context of {self._model.name} is {context}; shorten the prompt or ask for at most "
                f"{max(context - prompt_tokens, 0)} tokens"
            )
        if options.window_policy is not None and options.window_policy.protected_prefix > prompt_tokens:
            raise InputError(
                f"the window protects {options.window_policy.protected_prefix} tokens and the prompt has {prompt_tokens}; "
                "protect at most the prompt"
            )
        self._check_token_ids(options)
        pages = self.claim(run).total_pages
        if pages > self._kv.usable_pages:
            raise InputError(
                f"the request needs up to {pages} pages ({prompt_tokens} prompt tokens, max_tokens {options.max_tokens}, "
                f"page size {self._kv.page_size}) and the pool has {self._kv.usable_pages} usable ones; "
                f"load with num_pages={pages + 1} or more"
            )

    def _check_token_ids(self, options: RequestOptions) -> None:
        size = self._model.vocab_size
        for name, ids in (("stop_ids", options.stop_ids), ("logit_bias", options.sampling.logit_bias)):
            for token in ids:
                if not 0 <= token < size:
                    raise InputError(f"{name} names token {token}, and the vocabulary has ids 0..{size - 1}")


def _config(prepared: Prepared, resource: Resource, options: RequestOptions) -> RequestConfig:
    return RequestConfig(
        prompts=prepared.configs.get(resource.key, {}),
        prefix_cache=options.prefix_cache,
        salt=options.salt,
        sampling=options.sampling,
        prompt_logprobs=options.sampling.prompt_logprobs,
        retention=options.retention,
    )
