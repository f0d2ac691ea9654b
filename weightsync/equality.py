"""Whether engines hold the weights that they say they hold, on demand (rule W9).

    look (version, checksums, version again) ──► judge ──► one finding an engine

Only an engine that keeps the Hugging Face names, the embedded one, can be compared with the published version: others fuse and shard tensors, so their names
and checksums are of their own. Those of one version and one layout are compared with each other; what one of them loaded from the store stands for what was
published, and without such a one they may agree and all be wrong. Checksums take an engine seconds, during which it may decode nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import xxhash

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable, WeightError
from protocol.messages import EngineId, EngineStatus, Manifest
from weightsync.cast import FLOATS, SPELLED, cast
from weightsync.control import EngineControl
from weightsync.safetensors_file import open_model

Checksums: TypeAlias = Mapping[str, str]
"""xxh3-64, hex, by parameter name."""
_TIED = "lm_head.weight"
"""Left out of files, or not kept apart by an engine, where it is the embedding."""
_MOVED_AGAIN = 3
_STORE = "store"
_NOT_PROVEN = "compared with each other only: none of them loaded it from the store"
_NOT_COMPARED = "not compared: no other engine has its version and layout, and its names are its own or the version is not kept any more"


class Verdict(StrEnum):
    SAME = "same"
    """As it was published, or as an engine has it that loaded it from the store."""
    AGREE = "agree"
    """With each other, and with nothing that is known to be right."""
    DIFFERS = "differs"
    ALONE = "alone"
    """No engine of its version and layout, and no published version to compare with."""
    UNKNOWN = "unknown"
    """It did not answer, or would not hold still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an engine says that it holds."""

    engine_id: EngineId
    version: str
    dtype: str
    """torch's name, as the engine has it; "" or "auto": that of the files."""
    layout: str
    """Ranks and names: only equal ones can be compared."""
    ranks: tuple[Checksums, ...]
    published_names: bool
    """One rank with Hugging Face names."""
    from_store: bool = False
    """It loaded this version from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    engine_id: EngineId
    version: str
    verdict: Verdict
    why: str = ""
    """Names the first tensors that differ, or what is missing; empty where the engine is right."""


def judge(held: Sequence[Held], published: Mapping[tuple[str, str], Checksums]) -> list[Finding]:
    """One finding an engine, in order. `published`: by version and type, in the type.

    >>> one, two = ({"w": "0a"},), ({"w": "0b"},)
    >>> engines = [Held(engine_id=name, version="1:2", dtype="", layout="", ranks=ranks, published_names=False) for name, ranks in zip("abc", (one, one, two))]
    >>> [(finding.engine_id, finding.verdict.value) for finding in judge(engines, {})]
    [('a', 'agree'), ('b', 'agree'), ('c', 'differs')]
    """
    groups: dict[tuple[str, str, str], list[Held]] = {}
    for one in held:
        groups.setdefault((one.version, one.dtype, one.layout), []).append(one)
    return [_find(one, groups[one.version, one.dtype, one.layout], published.get((one.version, one.dtype)) if one.published_names else None) for one in held]


def _find(one: Held, group: Sequence[Held], published: Checksums | None) -> Finding:
    if published is not None:
        why = _difference(one.ranks[0], published)
        return Finding(engine_id=one.engine_id, version=one.version, verdict=Verdict.DIFFERS if why else Verdict.SAME, why=why)
    if len(group) == 1:
        return Finding(engine_id=one.engine_id, version=one.version, verdict=Verdict.ALONE, why=_NOT_COMPARED)
    right = [other for other in group if other.from_store]
    judges = right or group
    counts = Counter(_mark(other) for other in judges)
    mark, most = counts.most_common(1)[0]
    if _mark(one) == mark and most * 2 > len(judges):
        found = Finding(engine_id=one.engine_id, version=one.version, verdict=Verdict.SAME)
        return found if right else replace(found, verdict=Verdict.AGREE, why=_NOT_PROVEN)
    other = next(other for other in sorted(judges, key=lambda other: _mark(other) != mark) if _mark(other) != _mark(one))
    why = next(text for mine, theirs in zip(one.ranks, other.ranks, strict=True) if (text := _difference(mine, theirs)))
    return Finding(
        engine_id=one.engine_id, version=one.version, verdict=Verdict.DIFFERS, why=f"from {other.engine_id}{' (from the store)' * bool(right)}: {why}"
    )


def _mark(held: Held) -> bytes:
    return orjson.dumps(held.ranks, option=orjson.OPT_SORT_KEYS)


def _difference(mine: Checksums, theirs: Checksums) -> str:
    """Empty if there is none. A tied output layer may be named by one side only."""
    missing = sorted((mine.keys() ^ theirs.keys()) - {_TIED})
    if missing:
        return f"{len(missing)} tensors are on one side only, the first {missing[0]}"
    wrong = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
    return f"{len(wrong)} of {len(mine)} tensors, the first {wrong[0]}" if wrong else ""


async def look(engine: EngineStatus, control: EngineControl, *, deadline_s: float) -> Held | Finding:
    """What the engine holds while its version stays the same; a finding where it cannot be told."""
    problem = "it took a new version each time it was asked"
    try:
        dtype = str((await control.server_info(deadline_s=deadline_s)).get("dtype") or "")
        for _ in range(_MOVED_AGAIN):
            before = await control.weight_version(deadline_s=deadline_s)
            answer = await control.weights_checksum(deadline_s=deadline_s)
            if await control.weight_version(deadline_s=deadline_s) == before:
                return _held(engine, before, "" if dtype == "auto" else dtype, answer)
    except (ApplyFailed, EngineUnavailable, DecodeError) as refusal:
        problem = str(refusal)
    return Finding(engine_id=engine.engine_id, version="", verdict=Verdict.UNKNOWN, why=problem)


def _held(engine: EngineStatus, version: str, dtype: str, answer: Mapping[str, Any]) -> Held:
    """Raises: `DecodeError`."""
    ranks = answer.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) and isinstance(rank.get("checksums"), dict) for rank in ranks):
        raise DecodeError("ranks", f"expected checksums by rank, got {ranks!s:.100}")
    found = tuple({str(name): str(checksum) for name, checksum in rank["checksums"].items()} for rank in ranks)
    layout = orjson.dumps([[rank.get("parallelism_info"), sorted(rank["checksums"])] for rank in ranks], option=orjson.OPT_SORT_KEYS)
    return Held(
        engine_id=engine.engine_id,
        version=version,
        dtype=dtype,
        layout=xxhash.xxh3_64_hexdigest(layout),
        ranks=found,
        published_names=engine.kind == "embedded" and len(found) == 1,
        from_store=engine.transport == _STORE and engine.version is not None and str(engine.version) == version,
    )


def checksums(manifest: Manifest, dtype: str, folder: Path | None) -> Checksums:
    """Of every tensor of a version, floats in `dtype`. `folder`: where it lies whole; needed only where its type is another one. Blocks.

    Raises: `WeightError` where a number does not fit, or the files are needed and not there.
    """
    if _stays(manifest, dtype):
        return {entry.name: entry.checksum for entry in manifest.tensors}
    if folder is None:
        raise WeightError(f"version {manifest.version} is compared in {dtype} and must be read for that: its files are not at hand")
    with open_model(folder) as tensors:
        return {name: xxhash.xxh3_64_hexdigest(tensor.data) for name, tensor in cast(tensors, dtype).items()}


def _stays(manifest: Manifest, dtype: str) -> bool:
    return dtype not in SPELLED or all(entry.dtype == SPELLED[dtype] or entry.dtype not in FLOATS for entry in manifest.tensors)


async def check_engines(
    engines: Sequence[EngineStatus],
    control_of: Callable[[EngineStatus], EngineControl],
    *,
    manifest_of: Callable[[str], Awaitable[Manifest | None]],
    whole: Callable[[Manifest], Awaitable[Path]],
    deadline_s: float,
    settled: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """A finding for each engine, in order, one engine at a time so that the others go on decoding.

    `manifest_of`: the published version of this name, None if it is not kept any more. `whole`: the folder that holds it whole, read only if an engine computes
    in another type than it was published in; what that raises is passed on.
    `settled`: hears of each finding once, as soon as no answer of another engine can change it: at once, unless engines are compared with each other.
    """
    seen: list[Held | Finding] = []
    published: dict[tuple[str, str], Checksums] = {}
    for engine in engines:
        one = await look(engine, control_of(engine), deadline_s=deadline_s)
        seen.append(one)
        if isinstance(one, Finding):
            settled(one)
            continue
        of = one.version, one.dtype
        if one.published_names and of not in published and (manifest := await manifest_of(one.version)) is not None:
            folder = None if _stays(manifest, one.dtype) else await whole(manifest)
            published[of] = await asyncio.to_thread(checksums, manifest, one.dtype, folder)
        if _of_its_own(one, published):
            settled(judge([one], published)[0])
    held = [one for one in seen if isinstance(one, Held)]
    found = judge(held, published)
    for one, finding in zip(held, found, strict=True):
        if not _of_its_own(one, published):
            settled(finding)
    rest = iter(found)
    return [next(rest) if isinstance(one, Held) else one for one in seen]


def _of_its_own(held: Held, published: Mapping[tuple[str, str], Checksums]) -> bool:
    """Whether it is compared with what was published, and with no other engine."""
    return held.published_names and (held.version, held.dtype) in published
