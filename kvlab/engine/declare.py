"""At load: refuse a declaration that a node cannot honour, then open the caches of what can.

A model declares which streams may be reused. Whether that is safe depends on every resource of the node: a hit takes the
front of a request away from all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlab.cache.roots import base_root, checkpoint_identity, fingerprint
from kvlab.errors import LoadError
from kvlab.spec import SEQUENTIAL, ModelSpec, PrefixStream, Resource

logger = logging.getLogger("kvlab.engine")


# -- what is refused ---------------------------------------------------------------------------------------------------


def check_declaration(model: ModelSpec, resources: Sequence[Resource]) -> None:
    """Verify that ``resources`` can honour what ``model`` declares; those whose cache is switched off need not.

    Raises:
        LoadError: names resource, node, model and walk, and what would make it loadable.
    """
    by_key = {resource.key: resource for resource in resources}
    for key, streams in model.prefix_key_streams().items():
        if key not in by_key:
            raise LoadError(
                f"model {model.name} declares streams of resource {key}, and is loaded with {', '.join(by_key)}; "
                "add the resource, or take it out of prefix_key_streams()"
            )
        for label, stream in streams.items():
            _check_names(model, key, label, stream)
            if by_key[key].prefix_cache:
                _check_node(model, key, stream, resources)
                _check_feeds(model, key, stream)


def _check_names(model: ModelSpec, key: str, label: str, stream: PrefixStream) -> None:
    labels = model.kv_labels().get(key, ())
    if label not in labels:
        raise LoadError(
            f"model {model.name} declares label {label} of resource {key}, whose labels are {', '.join(labels) or 'none'}; "
            "correct prefix_key_streams() or kv_labels()"
        )
    walks = model.walks()
    for walk in sorted(stream.walks() - walks.keys()):
        raise LoadError(
            f"model {model.name} declares walk {walk} for {key}/{label}, and runs no such walk; its walks are "
            f"{', '.join(sorted(walks))}"
        )


def _check_node(model: ModelSpec, key: str, stream: PrefixStream, resources: Sequence[Resource]) -> None:
    for node in _nodes(model, stream):
        place = f"of node {node}, keyed by walk {stream.walk} of model {model.name}"
        for resource in resources:
            if key in resource.depends_on and resource.position_scheme not in (None, SEQUENTIAL):
                raise LoadError(
                    f"resource {resource.key} hands out {resource.position_scheme} positions over cache {key} {place}: K is "
                    f"stored rotated, so a page is right only where it was written; use {SEQUENTIAL} positions, or load with "
                    "prefix_cache=False"
                )
            if resource.node == node and not resource.prefix_skip_safe:
                raise LoadError(
                    f"resource {resource.key} {place}, is not prefix_skip_safe: a hit on {key} takes the front of a request "
                    "away from it too, so it would plan what never ran; move it to another node or load with prefix_cache=False"
                )


def _check_feeds(model: ModelSpec, key: str, stream: PrefixStream) -> None:
    # without further spans the text walk always runs its last token, so its reader always gets that
    servable = (stream.walk, *stream.layout_walks) if stream.layout_walks else ()
    for name in servable:
        walk = model.walks()[name]
        if walk.feeds:
            raise LoadError(
                f"walk {name} of model {model.name} on node {walk.node} feeds {', '.join(walk.feeds)}, and resource {key} may "
                "serve it whole: then it runs no forward and feeds nothing; take it out of layout_walks or feed otherwise"
            )


def _nodes(model: ModelSpec, stream: PrefixStream) -> list[str]:
    return sorted({model.walks()[walk].node for walk in stream.walks()})


# -- what is opened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseRoot:
    """Identity of one cache of one deployment, and the named values it was made of, so that a difference can be named."""

    root: bytes
    fields: Mapping[str, str]


def open_caches(model: ModelSpec, resources: Sequence[Resource]) -> dict[str, BaseRoot]:
    """Offer every resource its root; returns those of the resources the model declares streams of.

    A model that declares nothing opens nothing. A cache without a checkpoint to name and without a salt stays shut: two
    unnamed models would share it.

    Changes:
        calls ``enable_prefix_cache``; logs one line for each declared cache.
    """
    declared = model.prefix_key_streams()
    roots = _roots(model, resources)
    for resource in resources:
        streams = declared.get(resource.key, {})
        if resource.key in roots:
            resource.name_root(roots[resource.key].root, roots[resource.key].fields)
            resource.enable_prefix_cache(roots[resource.key].root, streams)
        if streams and resource.prefix_cache:
            _report_opening(model, resource, streams, is_named=resource.key in roots)
    return {key: root for key, root in roots.items() if key in declared}


def moved_root(model: ModelSpec, resources: Sequence[Resource], weights_epoch: int) -> dict[str, BaseRoot]:
    """The weights changed in place for the ``weights_epoch``-th time: drop what is cached and move every root.

    A root moved like this names nothing outside this process.

    Changes:
        calls ``reset_prefix_cache`` on every resource that was offered a root.
    """
    roots = _roots(model, resources, weights_epoch)
    for resource in resources:
        if resource.key in roots:
            resource.name_root(roots[resource.key].root, roots[resource.key].fields)
            resource.reset_prefix_cache("other_root: weights", roots[resource.key].root)
    return {key: root for key, root in roots.items() if key in model.prefix_key_streams()}


def _roots(model: ModelSpec, resources: Sequence[Resource], weights_epoch: int = 0) -> dict[str, BaseRoot]:
    """Roots of the resources that may open a cache, by key."""
    if not model.prefix_key_streams():
        return {}
    path = model.checkpoint_path()
    # a model whose loader hashed all its weights says so and spares a second reading
    pinned = getattr(model, "pinned_sha256", None)
    identity: list[bytes | str] = ["no checkpoint", model.name]
    if path is not None:
        identity = checkpoint_identity(path, pinned)
    if weights_epoch:
        identity = [*identity, "weights changed in place", str(weights_epoch)]
    can_open = (r for r in resources if _may_open(model, r, is_named=path is not None))
    return {resource.key: _root_of(model, resource, resources, identity) for resource in can_open}


def _may_open(model: ModelSpec, resource: Resource, *, is_named: bool) -> bool:
    """Every resource is offered a root, save pages the model declares no stream of or that nothing tells from another's."""
    if resource.key not in model.kv_labels():
        return True
    is_told_apart = is_named or bool(resource.root_fields().get("salt"))
    return resource.key in model.prefix_key_streams() and is_told_apart


def _root_of(model: ModelSpec, resource: Resource, resources: Sequence[Resource], identity: list[bytes | str]) -> BaseRoot:
    planned = [(other.key, other.root_fields()) for other in resources if resource.key in other.depends_on]
    preprocessing, own = model.preprocess_fingerprint(), resource.root_fields()
    fields = {"weights": fingerprint(*identity).hex()[:16], "preprocessing": preprocessing}
    fields |= {name: str(value) for name, value in own.items()}
    fields |= {f"{key}.{name}": str(value) for key, values in planned for name, value in values.items()}
    return BaseRoot(base_root(identity, preprocessing, own, planned), fields)


def _report_opening(model: ModelSpec, resource: Resource, streams: Mapping[str, PrefixStream], *, is_named: bool) -> None:
    if not is_named:
        logger.info(
            "%s: the prefix cache stays shut: model %s names no checkpoint and the salt is empty; set prefix_cache_salt for %s "
            "to open it",
            resource.key, model.name, resource.key,
        )  # fmt: skip
    elif getattr(resource, "index", None) is not None:  # it may refuse for reasons of its own, and says so itself
        nodes = sorted({node for stream in streams.values() for node in _nodes(model, stream)})
        logger.info("%s: pages of %s are keyed on node %s", resource.key, ", ".join(sorted(streams)), ", ".join(nodes))


def report_sizing(
    resource: str,
    *,
    usable_pages: int,
    page_size: int,
    max_seq_len: int,
    max_concurrent_requests: int | None,
    cpu_offload_pages: int = 0,
) -> None:
    """Log whether the pool holds the longest contexts of all requests that may run side by side.

    A warning when it does not and there are no host pages; one line of advice otherwise.
    """
    pages_each = -(-max_seq_len // page_size)
    is_bounded_badly = max_concurrent_requests is not None and max_concurrent_requests * pages_each > usable_pages
    if is_bounded_badly and not cpu_offload_pages:
        logger.warning(
            "%s: %d usable pages do not hold max_concurrent_requests=%d contexts of %d tokens (%d pages each); lower "
            "max_concurrent_requests to %d, give the pool more pages, or give host pages (cpu_offload_pages), or requests will "
            "wait for pages",
            resource, usable_pages, max_concurrent_requests, max_seq_len, pages_each, max(1, usable_pages // pages_each),
        )  # fmt: skip
        return
    logger.info(
        "%s: %d usable pages of %d slots hold %d contexts of %d tokens; max_concurrent_requests (%s) bounds how many run, "
        "and cpu_offload_pages (%d) is where some of them may make room",
        resource, usable_pages, page_size, usable_pages // pages_each, max_seq_len, max_concurrent_requests or "not set",
        cpu_offload_pages,
    )  # fmt: skip
