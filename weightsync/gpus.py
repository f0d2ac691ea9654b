"""What a GPU is called by processes that number GPUs differently, and whether two names are surely of different ones. Pure.

A process sees the GPUs that CUDA_VISIBLE_DEVICES lists, by number or UUID, and counts from 0 among them. Numbers are the same in all processes of a machine as
long as they agree on CUDA_DEVICE_ORDER; UUIDs always, also where only the beginning of one is given.

>>> name_of(1, {"CUDA_VISIBLE_DEVICES": "2,3"}), name_of(1, {}), name_of(1, {"CUDA_VISIBLE_DEVICES": "2"})
('3', '1', '')
>>> [apart({"3", "GPU-aa"}, theirs) for theirs in ({"3"}, {"2"}, {"GPU-aabb"}, {"GPU-bb"}, {"2", "3"}, {"MIG-aa"}, set())]
[False, True, False, True, False, False, False]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def name_of(index: int, environment: Mapping[str, str]) -> str:
    """Of GPU `index` as a process with this environment counts; empty: it sees none there."""
    if VISIBLE not in environment:
        return str(index)
    listed = [name.strip() for name in environment[VISIBLE].split(",")]
    return listed[index] if index < len(listed) else ""


def apart(names: Collection[str], others: Collection[str]) -> bool:
    """Whether the GPU of these `names` is known to be none of `others`, each a GPU. False where there is nothing to tell by."""
    return bool(others) and all(_differ(names, other) for other in others)


def _differ(names: Collection[str], other: str) -> bool:
    comparable = [name for name in names if _kind(name) and _kind(name) == _kind(other)]
    return bool(comparable) and not any(_same(name, other) for name in comparable)


def _same(one: str, other: str) -> bool:
    return int(one) == int(other) if one.isdecimal() else one.lower().startswith(other.lower()) or other.lower().startswith(one.lower())


def _kind(name: str) -> str:
    """Names of one kind can be compared; empty: it tells nothing."""
    return "number" if name.isdecimal() else next((kind for kind in ("GPU-", "MIG-") if name.upper().startswith(kind)), "")
