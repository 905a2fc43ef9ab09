"""What encoders made of pictures, kept by digest: the same picture with another question is not encoded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from kvlab.engine.run import Run
from kvlab.events import Event, MediaEncoded
from kvlab.options import whole
from kvlab.spec import Block, ModelSpec, Walk

Key = tuple[str, str, bytes]  # salt, walk, digest


class EncoderMemo:
    """Encoder outputs of one model, the least recently used go first.

    Requests share them as they share pages: those of one salt among each other, and those that asked for no prefix cache with
    nobody. A block without a digest is encoded each time.

    Args:
        max_bytes: most memory for outputs; one that is larger is not kept, and 0 keeps none.
        record: event sink, or None.
    """

    def __init__(self, model: ModelSpec, max_bytes: int, record: Callable[[Event], None] | None = None) -> None:
        self.max_bytes, self.num_bytes = whole("encoder_cache_bytes", max_bytes, 0), 0
        self._model, self._record = model, record
        self._kept: OrderedDict[Key, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def content(self, walk: Walk, run: Run, block: Block) -> Any:
        """Return what ``forward`` takes of ``block``, encoded where nothing is kept of it.

        Changes:
            counts the call in ``run``.
        """
        options = run.request.options
        if block.digest is None or not options.prefix_cache:
            return self._encode(walk, run, block)
        key = (options.salt, walk.name, block.digest)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        encoded = self._encode(walk, run, block)
        self._keep(key, encoded)
        return encoded

    def clear(self) -> None:
        """Forget everything: the weights changed, or a cold run is wanted."""
        self._kept.clear()
        self.num_bytes = 0

    def _encode(self, walk: Walk, run: Run, block: Block) -> Any:
        begin_s = perf_counter()
        encoded = self._model.encode(walk.name, block.content)
        run.encoder_calls += 1
        if self._record is not None:
            digest = "" if block.digest is None else block.digest.hex()
            self._record(MediaEncoded(run.rid, walk.name, digest, block.slots, (perf_counter() - begin_s) * 1e3))
        return encoded

    def _keep(self, key: Key, encoded: Any) -> None:
        size = num_bytes(encoded)
        if size > self.max_bytes:
            return
        self._kept[key] = encoded
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= num_bytes(oldest)


def num_bytes(value: Any) -> int:
    """Bytes of every tensor and byte string in ``value``: itself, or in what it is made of.

    >>> num_bytes({"grid": (2, 3), "pixels": b"123456"})
    6
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, bytes | bytearray):
        return len(value)
    if is_dataclass(value):
        return sum(num_bytes(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    return sum(map(num_bytes, value)) if isinstance(value, tuple | list) else 0
