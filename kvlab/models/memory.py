"""Is there room? Memory needed against memory there, before anything large is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kvlab.errors import LoadError

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: str | torch.device = "cpu") -> int:
    """Return the memory that can still be taken on ``device``; inside a container, what its limit leaves."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    machine = int(psutil.virtual_memory().available)
    limit = container_bytes(CGROUP)
    return machine if limit is None else min(machine, limit)


def container_bytes(group: Path) -> int | None:
    """Return what a Linux control group's limit leaves (its file cache counts as free); None without a limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def check_memory(needed: Mapping[str, int], device: str | torch.device = "cpu", *, available: int | None = None) -> None:
    """Refuse what does not fit, with both numbers.

    Args:
        needed: Bytes by what they are for, such as {"weights": ..., "KV pages": ...}; only what is yet to be made.
        device: Where they go.
        available: Bytes there; asked of the device when None.

    Raises:
        LoadError: more is needed than is there.

    >>> check_memory({"weights": 2 * GIB, "KV pages": 7 * GIB}, available=8 * GIB)
    Traceback (most recent call last):
    kvlab.errors.LoadError: 9.00 GiB are needed on cpu (2.00 GiB weights + 7.00 GiB KV pages) and 8.00 GiB are there; take fewer
    pages (num_pages= or pool_bytes=) or a smaller dtype
    """
    room = available_bytes(device) if available is None else available
    total = sum(needed.values())
    if total > room:
        parts = " + ".join(f"{n / GIB:.2f} GiB {what}" for what, n in needed.items())
        raise LoadError(
            f"{total / GIB:.2f} GiB are needed on {device} ({parts}) and {room / GIB:.2f} GiB are there; take fewer pages "
            "(num_pages= or pool_bytes=) or a smaller dtype"
        )
