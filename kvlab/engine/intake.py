"""From a prepared prompt to a request every resource knows: schedule, stop ids, and the refusals that need no step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Fills in a run once the worker has delivered its prompt.

    Args:
        profile: "kvlab", or "published", which never looks up a guided prompt.
    """

    def __init__(self, model: ModelSpec, kv: KVResource, resources: Sequence[Resource], *, profile: str = "kvlab") -> None:
        self._model, self._kv, self._resources = model, kv, tuple(resources)
        self._is_published = profile == "published"
        self._walks = dict(model.walks())

    def prepare(self, run: Run, prepared: Prepared) -> None:
        """Complete ``run`` and tell every resource about it.

        Raises:
            InputError: the request overflows the context, could never fit the pool, or asks for what does not go with pictures;
                no resource has heard of it then.
        """
        options = run.request.options
        run.record, run.configs, run.prompt_ids = prepared.record, prepared.configs, tuple(self._main_ids(prepared))
        run.schedule = self._model.schedule(prepared.record, options.max_tokens)
        run.prompt_slots = run.input_tokens = self._slots(run, options.max_tokens)["main"][0]
        self._check_options(run, options)
        self._check_fits(run, options)
        own_stops = () if options.ignore_eos else self._model.processor.stop_ids
        run.stop_ids = frozenset((*options.stop_ids, *own_stops))
        run.text = TextStream(self._model.processor.decode, options.stop)
        self._ingest(run)
        run.prepared = True

    def extends_prompt(self, run: Run) -> bool:
        """True when a request that starts over may take what it has generated for part of its prompt: plain text."""
        return not run.is_laid_out and self._walks[run.schedule[0]].samples

    def send_back(self, run: Run, prepared: Prepared | None) -> None:
        """Let ``run`` begin anew: with ``prepared``, which is its prompt and what it has generated, or to replay that."""
        misses = [miss for resource in self._resources for miss in resource.cached_misses(run.rid)]
        run.send_back(misses)
        if prepared is not None:
            run.configs = prepared.configs
            run.extend_prompt(replace(prepared.record, fork=run.record.fork))
        for resource in self._resources:
            resource.resume_request(run.rid, _config(run, resource))

    def claim(self, run: Run) -> Claim:
        """What ``run`` will hold until its end."""
        slots = self._slots(run, run.request.options.max_tokens - (run.input_tokens - run.prompt_slots))
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
        is_guided = sum(prompt > 0 for prompt, _ in slots.values()) > 1
        return Claim(run.rid, total_pages, prompt_pages, growth, own_pages, looks_up=not (is_guided and self._is_published))

    def _slots(self, run: Run, max_tokens: int) -> Mapping[str, tuple[int, int]]:
        return self._model.slots(run.record, max_tokens)

    def _ingest(self, run: Run) -> None:
        try:
            for resource in self._resources:
                resource.ingest_request(run.rid, _config(run, resource))
        except Exception:
            for resource in self._resources:  # one of them refused: none may remember the request
                resource.remove_request(run.rid)
            raise

    def _main_ids(self, prepared: Prepared) -> Sequence[int]:
        streams = self._model.prefix_key_streams().get(self._kv.key, {})
        tensor = streams["main"].tensor if "main" in streams else next(iter(prepared.record.tensors))
        return prepared.record.tensors[tensor]

    def _check_options(self, run: Run, options: RequestOptions) -> None:
        self._check_token_ids(options)
        several = run.is_laid_out or sum(end > 0 for _, end in self._slots(run, options.max_tokens).values()) > 1
        for name, is_asked in (("window", options.window is not None), ("prompt_logprobs", run.wants_prompt_logprobs)):
            if several and is_asked:
                raise InputError(
                    f"{name} is for a prompt of one text, and this one has pictures, several texts or guidance; leave it out"
                )

    def _check_fits(self, run: Run, options: RequestOptions) -> None:
        self._check_context(run, options)
        if options.window_policy is not None and options.window_policy.protected_prefix > run.prompt_slots:
            raise InputError(
                f"the window protects {options.window_policy.protected_prefix} tokens and the prompt has {run.prompt_slots}; "
                "protect at most the prompt"
            )
        pages = self.claim(run).total_pages
        if pages > self._kv.usable_pages:
            raise InputError(
                f"the request needs up to {pages} pages ({run.prompt_slots} prompt tokens, max_tokens {options.max_tokens}, "
                f"page size {self._kv.page_size}{self._by_label(run)}) and the pool has {self._kv.usable_pages} usable ones; "
                f"load with num_pages={pages + 1} or more"
            )

    def _by_label(self, run: Run) -> str:
        """Name the pages of each label where there are several: a guided drawing holds a second prompt."""
        ends = {label: end for label, (_, end) in self._slots(run, run.request.options.max_tokens).items() if end}
        if len(ends) < 2:
            return ""
        return "; " + ", ".join(f"{label} {self._kv.pages_needed(end)}" for label, end in ends.items())

    def _check_context(self, run: Run, options: RequestOptions) -> None:
        """The context is counted in rope ids, of which a picture has one."""
        positions, context = self._prompt_positions(run), self._model.max_seq_len
        walks = [self._walks[name] for name in run.schedule]
        prompt, end = self._slots(run, options.max_tokens)["main"]
        new = max(end - prompt, options.max_tokens if any(w.samples for w in walks) else 0)
        total = positions + new + any(not walk.commits for walk in walks)  # what is drawn stands at one more
        if total > context:
            what = "tokens" if positions == run.prompt_slots else f"positions ({run.prompt_slots} slots)"
            room = context - (total - options.max_tokens)
            ask = f" or ask for at most {room} tokens" if room > 0 else ""
            raise InputError(
                f"the prompt has {positions} {what} and max_tokens is {options.max_tokens}: {total} together, and the "
                f"context of {self._model.name} is {context}; shorten the prompt{ask}"
            )

    def _prompt_positions(self, run: Run) -> int:
        layout = run.record.layouts.get(self._kv.key, {}).get("main", ())
        return sum(span.advance for span in layout) if layout else run.prompt_slots

    def _check_token_ids(self, options: RequestOptions) -> None:
        size = self._model.vocab_size
        for name, ids in (("stop_ids", options.stop_ids), ("logit_bias", options.sampling.logit_bias)):
            for token in ids:
                if not 0 <= token < size:
                    raise InputError(f"{name} names token {token}, and the vocabulary has ids 0..{size - 1}")


def _config(run: Run, resource: Resource) -> RequestConfig:
    options = run.request.options
    return RequestConfig(
        prompts=run.configs.get(resource.key, {}),
        prefix_cache=options.prefix_cache,
        salt=options.salt,
        sampling=options.sampling,
        prompt_logprobs=options.sampling.prompt_logprobs,
        retention=options.retention,
    )
