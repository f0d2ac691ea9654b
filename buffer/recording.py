"""A recording: steps and groups of a run outside Redis. Spill, replay dumps and rollout-only recordings are all of this format.

    about.json                        the run it is from
    steps/000000/000000123-000002     step 123 as incarnation 2 trained it: its journal and its payloads
    groups/000000/000000007-5e1f      groups that no step has taken, in the order written

An object is written whole (`protocol.objects`) and checks itself: its index by a digest, payloads by those in the headers. No pickle anywhere. Large extras
stay in the blob store, which keeps those of recorded groups; `buffer.replay.self_contained` takes them along. All of it blocks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from buffer.config import BufferConfig
from buffer.contract import ChunkRecord
from buffer.journal_codec import decode_chunk, encode_chunk
from buffer.payloads import check_payload
from buffer.record_file import RecordFile, record_parts
from protocol.codec import decode, encode
from protocol.errors import DecodeError, PayloadLost, ReplayGap
from protocol.identity import RunIdentity
from protocol.messages import GroupHeader, Seq, SlotToken
from protocol.objects import ObjectStore

_STEP, _GROUPS, _ABOUT = "recorded_step", "recorded_groups", "about.json"
_STEP_NAME = re.compile(r"steps/\d{6,}/(\d{9,})-(\d{6,})")
_GROUPS_NAME = re.compile(r"groups/\d{6,}/(\d{9,})-[0-9a-f]+")
_FOLDER_SIZE = 1000
"""Objects of one kind that share a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingAbout:
    """Where a recording is from."""

    run: str
    identity: RunIdentity
    settings: BufferConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """A trained step: what it took, in order, and what it was judged by."""

    step: int
    incarnation: int
    """That trained it."""
    digest: str
    """Of the weights after it."""
    at: float
    """Unix seconds, when it was trained, by the clock of Redis."""
    chunks: tuple[ChunkRecord, ...]
    payloads: tuple[tuple[bytes, ...], ...]
    """By chunk, in the order of its headers. b"": it was lost before it could be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedGroup:
    header: GroupHeader
    payload: bytes


def about_json(about: RecordingAbout) -> bytes:
    identity = {name: getattr(about.identity, name) for name in about.identity.__dataclass_fields__}
    return orjson.dumps({"run": about.run, "identity": identity, "settings": about.settings.model_dump(mode="json")}, option=orjson.OPT_INDENT_2)


def read_about(raw: bytes, place: str) -> RecordingAbout:
    """Raises: `DecodeError` naming `place`."""
    try:
        found = orjson.loads(raw)
        run, settings = str(found["run"]), {name: value for name, value in found["settings"].items() if name in BufferConfig.model_fields}
        return RecordingAbout(run=run, identity=RunIdentity.read(orjson.dumps(found["identity"]), run=run), settings=BufferConfig.model_validate(settings))
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as problem:
        raise DecodeError(place, f"not an account of a run ({type(problem).__name__}: {problem})") from problem


class Recording:
    """Steps and groups in an object store. One process writes at a time; any number read."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._next_groups: int | None = None

    @property
    def url(self) -> str:
        return self._store.url

    # about ------------------------------------------------------------------------------------------------------------------

    def describe(self, about: RecordingAbout) -> None:
        self._store.write(_ABOUT, [about_json(about)])

    def described(self) -> bool:
        return bool(self._store.names(_ABOUT))

    def about(self) -> RecordingAbout:
        """Raises: `ReplayGap` where nothing was recorded, `DecodeError`."""
        try:
            raw = self._store.read(_ABOUT)
        except FileNotFoundError as problem:
            raise ReplayGap(f"{self.url} is no recording: it has no {_ABOUT}; correct the folder or URL") from problem
        return read_about(raw, f"{self.url}/{_ABOUT}")

    # steps ------------------------------------------------------------------------------------------------------------------

    def write_step(self, step: RecordedStep) -> None:
        """Durable on return. Written again by the same incarnation, it replaces."""
        bodies = [payload for chunk in step.payloads for payload in chunk]
        headers = [header for chunk in step.chunks for header in chunk.headers]
        if [len(chunk.headers) for chunk in step.chunks] != [len(chunk) for chunk in step.payloads] or any(
            body and len(body) != header.payload_bytes for body, header in zip(bodies, headers, strict=True)
        ):
            raise ValueError(f"step {step.step}: the payloads are not those of its chunks' headers")
        index = {
            "step": step.step,
            "incarnation": step.incarnation,
            "digest": step.digest,
            "at": step.at,
            "chunks": [encode_chunk(chunk) for chunk in step.chunks],
        }
        self._store.write(_step_name(step.step, step.incarnation), record_parts(_STEP, index, bodies))

    def steps(self) -> list[int]:
        """Ascending."""
        return sorted({step for step, _, _ in _numbered(self._store.names("steps/"), _STEP_NAME)})

    def read_step(self, step: int) -> RecordedStep:
        """As the newest incarnation that recorded it did. Raises: `ReplayGap`, `DecodeError` naming the object or the group."""
        record = RecordFile(self._store, self._newest(step), _STEP, whole=True)
        found, bodies = _step_index(record), iter(range(len(record.sizes)))
        payloads = tuple(tuple(_checked(record, header, next(bodies)) for header in chunk.headers) for chunk in found.chunks)
        return RecordedStep(step=found.step, incarnation=found.incarnation, digest=found.digest, at=found.at, chunks=found.chunks, payloads=payloads)

    def trained_at(self, step: int) -> float:
        """Unix seconds, of `read_step`; its payloads are not looked at. Raises as `read_step`."""
        return _step_index(RecordFile(self._store, self._newest(step), _STEP, whole=False)).at

    def find(self, step: int, headers: Iterable[GroupHeader]) -> dict[tuple[Seq, SlotToken], bytes]:
        """Payloads of these groups of a step, as far as they are recorded whole, by whichever incarnation; only what is asked for is read."""
        wanted = {(header.seq, header.token): header for header in headers}
        found: dict[tuple[Seq, SlotToken], bytes] = {}
        for name in self._of_step(step):
            try:
                record = RecordFile(self._store, name, _STEP, whole=False)
                recorded = [header for chunk in _step_index(record).chunks for header in chunk.headers]
            except (DecodeError, FileNotFoundError):
                continue
            for at, key in enumerate((header.seq, header.token) for header in recorded):
                if key in wanted and key not in found:
                    try:
                        found[key] = check_payload(wanted[key], record.body(at))
                    except (DecodeError, PayloadLost, FileNotFoundError):
                        continue
            if len(found) == len(wanted):
                break
        return found

    def _newest(self, step: int) -> str:
        if not (names := self._of_step(step)):
            raise ReplayGap(f"step {step} is not recorded in {self.url}; recorded are {step_ranges(self.steps())}")
        return names[0]

    def _of_step(self, step: int) -> list[str]:
        """Its objects, newest incarnation first."""
        prefix = _step_name(step, 0).rpartition("-")[0] + "-"
        return [name for _, _, name in sorted(_numbered(self._store.names(prefix), _STEP_NAME), reverse=True)]

    # groups -----------------------------------------------------------------------------------------------------------------

    def write_groups(self, groups: Sequence[RecordedGroup]) -> None:
        """Durable on return."""
        if not groups:
            return
        if any(len(group.payload) != group.header.payload_bytes for group in groups):
            raise ValueError("a payload is not the one of its header")
        if self._next_groups is None:
            self._next_groups = 1 + max((number for number, _, _ in _numbered(self._store.names("groups/"), _GROUPS_NAME)), default=0)
        name = f"groups/{self._next_groups // _FOLDER_SIZE:06d}/{self._next_groups:09d}-{secrets.token_hex(4)}"
        self._store.write(name, record_parts(_GROUPS, {"headers": [encode(group.header) for group in groups]}, [group.payload for group in groups]))
        self._next_groups += 1

    def groups(self) -> Iterator[RecordedGroup]:
        """Each (seq, token) once, in the order written. Raises: `DecodeError` naming the object or the group."""
        seen: set[tuple[Seq, SlotToken]] = set()
        for _, _, name in sorted(_numbered(self._store.names("groups/"), _GROUPS_NAME)):
            record = RecordFile(self._store, name, _GROUPS, whole=True)
            for at, header in enumerate(_headers(record)):
                if (header.seq, header.token) not in seen:
                    seen.add((header.seq, header.token))
                    yield RecordedGroup(header=header, payload=_checked(record, header, at))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StepIndex:
    step: int
    incarnation: int
    digest: str
    at: float
    chunks: tuple[ChunkRecord, ...]


def _step_index(record: RecordFile) -> _StepIndex:
    index: dict[str, Any] = record.index
    try:
        found = _StepIndex(
            step=int(index["step"]),
            incarnation=int(index["incarnation"]),
            digest=str(index["digest"]),
            at=float(index["at"]),
            chunks=tuple(decode_chunk(chunk) for chunk in index["chunks"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, DecodeError) as problem:
        raise DecodeError(record.place, f"not a recorded step ({type(problem).__name__}: {problem})") from problem
    if sum(len(chunk.headers) for chunk in found.chunks) != len(record.sizes):
        raise DecodeError(record.place, f"{len(record.sizes)} payloads, its chunks have {sum(len(chunk.headers) for chunk in found.chunks)} groups")
    return found


def _headers(record: RecordFile) -> list[GroupHeader]:
    raw = record.index.get("headers")
    if not (isinstance(raw, list) and len(raw) == len(record.sizes) and all(isinstance(one, bytes) for one in raw)):
        raise DecodeError(record.place, f"headers: expected {len(record.sizes)}, one a payload")
    try:
        return [decode(GroupHeader, one) for one in raw]
    except DecodeError as problem:
        raise DecodeError(record.place, str(problem)) from problem


def _checked(record: RecordFile, header: GroupHeader, at: int) -> bytes:
    if not record.sizes[at]:
        return b""
    try:
        return check_payload(header, record.body(at))
    except PayloadLost as problem:
        raise DecodeError(record.place, str(problem)) from problem


def _numbered(names: Iterable[str], pattern: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    """(number, second number or 0, name) of the objects that are of this kind; what else lies there is not ours."""
    for name in names:
        if (match := pattern.fullmatch(name)) is not None:
            yield int(match[1]), int(match[2]) if pattern.groups > 1 else 0, name


def _step_name(step: int, incarnation: int) -> str:
    return f"steps/{step // _FOLDER_SIZE:06d}/{step:09d}-{incarnation:06d}"


def step_ranges(steps: Iterable[int]) -> str:
    """For people, of ascending numbers: `1 to 4, 7, 9 to 12`; the first eight of them."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans[:8]) + (", …" if len(spans) > 8 else "") or "none"
