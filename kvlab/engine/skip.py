"""The front of a walk that the cache holds does not run: who is asked, what is agreed on, and what is cut.

It happens after a model prepared a walk's inputs and before its step is declared, so that everything later sees only the
shorter request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlab.errors import InputError
from kvlab.spec import Match, ModelSpec, PrefixStream, RequestId, Resource, Walk, WalkInputs

PROFILES = ("kvlab", "published")


def probed_streams(model: ModelSpec, walk: str, *, profile: str = "kvlab") -> list[PrefixStream]:
    """Streams whose cached pages may stand in for ``walk``: it writes their keyed text, or a span of their layout.

    The declaration names the walk. Whether a walk's inputs can be cut is another question, asked beside it.
    """
    streams = [stream for by_label in model.prefix_key_streams().values() for stream in by_label.values()]
    return [s for s in streams if walk == s.walk or (walk in s.layout_walks and profile == "kvlab")]


def probe_refusal(model: ModelSpec, walk: str, inputs: WalkInputs, *, profile: str = "kvlab") -> str | None:
    """Return why nobody is asked about ``inputs`` (a name of MISS_CAUSES), or None when every resource is.

    ``profile="published"`` has the published system's boundaries: a guided walk is never probed, nor one that writes media. A
    walk of several labels is cut label by label, as one that carries guidance.

    Raises:
        InputError: the walk writes keyed text at positions of its own, or has no ids; its pages could not be named.
    """
    streams = probed_streams(model, walk, profile=profile)
    if not streams:
        return "walk_not_keyed"
    if any(walk == s.walk for s in streams):
        _require_keyed_ids(model, walk, inputs)
    trims_guided = profile == "kvlab" and all(s.trims_guided for s in streams)
    is_guided = inputs.opaque or len(inputs.slots()) > 1
    return "opaque_inputs" if is_guided and not trims_guided else None


def _require_keyed_ids(model: ModelSpec, walk: str, inputs: WalkInputs) -> None:
    if inputs.positions is not None:
        raise InputError(
            f"model {model.name}, walk {walk}: it places its own positions, and its pages are keyed by ids at sequential "
            "positions; leave positions to the engine, or do not declare this walk in prefix_key_streams()"
        )
    if not any(len(ids) for ids in inputs.ids.values()):
        raise InputError(
            f"model {model.name}, walk {walk}: it is keyed by ids and its inputs have none; give ids, or return None from "
            "prepare_inputs for a walk that has nothing to run"
        )


def resolve_matches(
    resources: Sequence[Resource], rid: RequestId, node: str, walk: str, inputs: WalkInputs
) -> dict[str, Match]:
    """Ask every resource; per label the smallest answer is agreed on. No opinion is not an answer of zero."""
    agreed: dict[str, Match] = {}
    for resource in resources:
        for label, match in (resource.resolve_cached_prefix(rid, node, walk, inputs) or {}).items():
            agreed[label] = min(agreed.get(label, match), match, key=lambda m: (m.slots, m.positions))
    return agreed


def skip_cached(
    model: ModelSpec, resources: Sequence[Resource], rid: RequestId, walk: Walk, inputs: WalkInputs, *, profile: str = "kvlab"
) -> tuple[WalkInputs, Mapping[str, Match]]:
    """Return what of ``inputs`` must run, and what is served; the very same object when nothing is.

    Raises:
        InputError: as ``probe_refusal``.

    Changes:
        every resource learns of the agreed match, or of why it was not asked.
    """
    cause = probe_refusal(model, walk.name, inputs, profile=profile)
    if cause is not None:
        for resource in resources:
            resource.note_unprobed(rid, walk.node, walk.name, inputs, cause)
        return inputs, {}
    matches = resolve_matches(resources, rid, walk.node, walk.name, inputs)
    # also when all agreed on nothing: one of them may hold pages that it must let go of, or it would serve them all the same
    for resource in resources if matches else ():
        resource.apply_cached_prefix(rid, walk.node, walk.name, inputs, matches)
    served = {label: match for label, match in matches.items() if match.slots > 0}
    return (model.split_inputs(walk.name, inputs, served), served) if served else (inputs, {})


class SkipStage:
    """``skip_cached`` for one engine.

    Args:
        profile: "kvlab", or "published" for the published system's boundaries.
    """

    def __init__(self, model: ModelSpec, resources: Sequence[Resource], *, profile: str = "kvlab") -> None:
        if profile not in PROFILES:
            raise InputError(f"profile is {profile!r}; it must be one of {', '.join(PROFILES)}")
        self._model, self._resources, self._profile = model, tuple(resources), profile

    def __call__(self, rid: RequestId, walk: Walk, inputs: WalkInputs) -> tuple[WalkInputs, Mapping[str, Match]]:
        """Cut what is cached from the front of ``inputs``. A walk that loops reads what was just sampled: nothing to skip."""
        if walk.loops:
            return inputs, {}
        return skip_cached(self._model, self._resources, rid, walk, inputs, profile=self._profile)
