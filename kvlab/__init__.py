"""kvlab: what happens when requests to a multimodal model share the KV pages of a common prefix?

    import kvlab
    engine = kvlab.load("smollm2-135m", num_pages=256)
    first = engine.generate(kvlab.chat("What is a KV cache?", system="Be brief."), max_tokens=32)

Every public name is loaded on first use, so that ``import kvlab`` costs milliseconds and imports no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab import cache, lab, viz
    from kvlab.assemble import load
    from kvlab.engine.engine import Engine
    from kvlab.engine.request import GenerationResult
    from kvlab.errors import InputError, IntegrityError, KvlabError, StallError
    from kvlab.models.registry import fetch
    from kvlab.recorder import Recorder
    from kvlab.spec import Chat, ask, chat, draw

__version__ = "0.1.0"

logging.getLogger("kvlab").addHandler(logging.NullHandler())  # a notebook shows nothing unless it asks

__all__ = [
    "load",
    "chat",
    "ask",
    "draw",
    "fetch",
    "Engine",
    "GenerationResult",
    "Chat",
    "Recorder",
    "KvlabError",
    "InputError",
    "IntegrityError",
    "StallError",
    "cache",
    "lab",
    "viz",
    "__version__",
]

#: name -> "module:attribute", or "module" for a room that is offered whole.
_LAZY = {
    "load": "kvlab.assemble:load",
    "chat": "kvlab.spec:chat",
    "ask": "kvlab.spec:ask",
    "draw": "kvlab.spec:draw",
    "fetch": "kvlab.models.registry:fetch",
    "Engine": "kvlab.engine.engine:Engine",
    "GenerationResult": "kvlab.engine.request:GenerationResult",
    "Chat": "kvlab.spec:Chat",
    "Recorder": "kvlab.recorder:Recorder",
    "KvlabError": "kvlab.errors:KvlabError",
    "InputError": "kvlab.errors:InputError",
    "IntegrityError": "kvlab.errors:IntegrityError",
    "StallError": "kvlab.errors:StallError",
    "cache": "kvlab.cache",
    "lab": "kvlab.lab",
    "viz": "kvlab.viz",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; it offers {', '.join(__all__)}")
    module, _, attribute = _LAZY[name].partition(":")
    value = importlib.import_module(module)
    globals()[name] = value = getattr(value, attribute) if attribute else value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
