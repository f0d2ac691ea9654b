"""Groups as files for other tools and other runs: Parquet or JSONL, one row a group.

    journalled steps ─┐                                       ┌─► import: a producer of another run, through its ledger
    READY groups ─────┴─► export ─► FILE.parquet, FILE.jsonl ─┼─► rl-trainer --recorded FILE
                                                              └─► pandas, DuckDB, datasets, …

A row has columns to read (`step, chunk, seq, rewards, token_ids, mask, logprobs, versions`, …) and columns that are exact: `header`, `payload` and
`chunk_record` are the bytes of the run, base64 in JSONL. Only the exact ones are read back, so what was exported is what is imported, byte for byte.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Protocol, Self

import orjson

from buffer.config import BufferConfig
from buffer.contract import ChunkRecord
from buffer.journal_codec import decode_chunk, encode_chunk
from buffer.payloads import check_payload
from buffer.recording import RecordedGroup, RecordedStep, RecordingAbout, about_json, read_about
from buffer.replay import cut_into_steps
from protocol.codec import decode, decode_group, encode
from protocol.durable import sync_folder
from protocol.errors import ConfigError, DecodeError, PayloadLost
from protocol.messages import GroupHeader

_FORMAT = "rollstream_export"
_EXACT = ("header", "payload", "chunk_record")
_PLACE = ("step", "chunk", "incarnation", "digest", "trained_at")
_ROWS = 64
"""Rows of a Parquet file that are in memory at once."""
_MISSING = "Parquet needs pyarrow: `pip install 'rollstream[parquet]'`, or use a file that ends in .jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Where in the journal a group lay."""

    chunk: ChunkRecord
    """Without its headers."""
    incarnation: int
    digest: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExportedGroup:
    header: GroupHeader
    payload: bytes
    place: StepPlace | None = None
    """None: it was READY, or recorded without a trainer."""


def rows_of(step: RecordedStep) -> Iterator[ExportedGroup]:
    """The groups of a journalled step, in its order."""
    for chunk, payloads in zip(step.chunks, step.payloads, strict=True):
        place = StepPlace(chunk=dataclasses.replace(chunk, headers=()), incarnation=step.incarnation, digest=step.digest, at=step.at)
        for header, payload in zip(chunk.headers, payloads, strict=True):
            yield ExportedGroup(header=header, payload=payload, place=place)


def check_format(path: Path) -> None:
    """Raises: `ConfigError` for a file name of neither format, or of Parquet where pyarrow is not installed."""
    if path.suffix == ".parquet":
        _pyarrow()
    elif path.suffix != ".jsonl":
        raise ConfigError(f"{path}: expected a name that ends in .parquet or .jsonl")


# -- writing -------------------------------------------------------------------------------------------------------------------------------------


class _Sheet(Protocol):
    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


class ExportWriter:
    """`with ExportWriter(path, about) as export: export.write(groups)`. The file is whole and durable after the context, or not there. All of it blocks."""

    def __init__(self, path: Path, about: RecordingAbout) -> None:
        check_format(path)
        self._path, self._about = path, about
        self._part = path.with_name(f".{path.name}.part")
        self._sheet: _Sheet | None = None

    def __enter__(self) -> Self:
        try:
            self._sheet = (_ParquetSheet if self._path.suffix == ".parquet" else _JsonlSheet)(self._part, self._about)
        except OSError as problem:
            raise ConfigError(f"--out {self._path}: cannot be written ({problem.strerror or problem})") from problem
        return self

    def write(self, groups: Sequence[ExportedGroup]) -> None:
        assert self._sheet is not None
        self._sheet.rows([_row(group) for group in groups])

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        assert self._sheet is not None
        try:
            self._sheet.close()
            if kind is None:
                with self._part.open("rb") as file:
                    os.fsync(file.fileno())
                self._part.replace(self._path)
                sync_folder(self._path.absolute().parent)
        finally:
            self._part.unlink(missing_ok=True)


def _row(exported: ExportedGroup) -> dict[str, Any]:
    header, group, place = exported.header, decode_group(exported.payload), exported.place
    return {
        "step": place.chunk.step if place else None,
        "chunk": place.chunk.chunk if place else None,
        "incarnation": place.incarnation if place else None,
        "digest": place.digest if place else None,
        "trained_at": place.at if place else None,
        "seq": header.seq,
        "attempt": header.attempt,
        "token": header.token,
        "prompt_id": header.prompt_id,
        "producer_id": header.producer_id,
        "rewards": list(header.rewards),
        "lengths": list(header.lengths),
        "token_ids": [rollout.tokens for rollout in group.rollouts],
        "mask": [rollout.mask for rollout in group.rollouts],
        "logprobs": [rollout.logprobs for rollout in group.rollouts],
        "versions": [[{"version": str(span.version), "start": span.start, "end": span.end} for span in rollout.spans] for rollout in group.rollouts],
        "header": encode(header),
        "payload": exported.payload,
        "chunk_record": encode_chunk(place.chunk) if place else None,
    }


class _JsonlSheet:
    def __init__(self, path: Path, about: RecordingAbout) -> None:
        self._file: BinaryIO = path.open("wb")
        self._file.write(orjson.dumps({_FORMAT: orjson.loads(about_json(about))}, option=orjson.OPT_APPEND_NEWLINE))

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            exact = {name: None if row[name] is None else base64.b64encode(row[name]).decode() for name in _EXACT}
            self._file.write(orjson.dumps({**row, **exact}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))

    def close(self) -> None:
        self._file.close()


class _ParquetSheet:
    def __init__(self, path: Path, about: RecordingAbout) -> None:
        pa = self._pa = _pyarrow()
        per_token = {"token_ids": pa.int32(), "mask": pa.uint8(), "logprobs": pa.float32()}
        span = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
        self._schema = pa.schema(
            [
                *(("step", pa.int64()), ("chunk", pa.int32()), ("incarnation", pa.int32()), ("digest", pa.string()), ("trained_at", pa.float64())),
                *(("seq", pa.int64()), ("attempt", pa.int32()), ("token", pa.string()), ("prompt_id", pa.string()), ("producer_id", pa.string())),
                *(("rewards", pa.list_(pa.float64())), ("lengths", pa.list_(pa.int32()))),
                *((name, pa.list_(pa.list_(kind))) for name, kind in per_token.items()),
                ("versions", pa.list_(pa.list_(span))),
                *((name, pa.large_binary()) for name in _EXACT),
            ],
            metadata={_FORMAT: about_json(about)},
        )
        self._file: BinaryIO = path.open("wb")
        self._writer = pa.parquet.ParquetWriter(self._file, self._schema, compression="zstd")

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._writer.write_table(self._pa.Table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        with contextlib.closing(self._file):
            self._writer.close()


def _pyarrow() -> ModuleType:
    """Raises: `ConfigError` saying what to install."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as problem:
        raise ConfigError(_MISSING) from problem
    module: ModuleType = pa
    return module


# -- reading -------------------------------------------------------------------------------------------------------------------------------------


class Export:
    """An export as written. Read it as often as needed; nothing of it stays open between two reads. Blocks."""

    def __init__(self, path: Path) -> None:
        """Raises: `ConfigError` for a file that is not there or of another format, `DecodeError` for one of ours that is damaged."""
        check_format(path)
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        self.path = path
        self._parquet = path.suffix == ".parquet"
        self.about = read_about(_parquet_about(path) if self._parquet else _jsonl_about(path), str(path))

    def groups(self) -> Iterator[ExportedGroup]:
        """In the order of the file. Raises: `DecodeError` naming the row."""
        for number, (place, row) in enumerate(_parquet_rows(self.path, _EXACT) if self._parquet else _jsonl_rows(self.path), 1):
            yield _group(row, place, f"{self.path}, row {number}")

    def headers(self) -> Iterator[GroupHeader]:
        """Without reading the payloads of a Parquet file."""
        rows = _parquet_rows(self.path, ("header",)) if self._parquet else _jsonl_rows(self.path)
        for number, (_, row) in enumerate(rows, 1):
            yield _header(row, f"{self.path}, row {number}")

    def steps(self, settings: BufferConfig) -> Iterator[RecordedStep]:
        """The journalled steps in it; groups that were READY are cut into steps of B by `settings`."""
        groups = self.groups()
        first = next(groups, None)
        if first is None:
            return
        everything = itertools.chain([first], groups)
        if first.place is None:
            yield from cut_into_steps((RecordedGroup(header=group.header, payload=group.payload) for group in everything), settings)
            return
        for _, rows in itertools.groupby(everything, key=_step_number):
            yield _step(list(rows))


def _step_number(group: ExportedGroup) -> int | None:
    return group.place.chunk.step if group.place is not None else None


def _step(rows: Sequence[ExportedGroup]) -> RecordedStep:
    chunks: list[ChunkRecord] = []
    payloads: list[tuple[bytes, ...]] = []
    places = [row.place for row in rows if row.place is not None]
    for _, part in itertools.groupby(rows, key=lambda row: row.place.chunk.chunk if row.place is not None else None):
        members = list(part)
        place = members[0].place
        if place is None:
            raise DecodeError("step", f"group {members[0].header.seq} has no step, and others in the file have one")
        chunks.append(dataclasses.replace(place.chunk, headers=tuple(member.header for member in members)))
        payloads.append(tuple(member.payload for member in members))
    chunks[-1] = dataclasses.replace(chunks[-1], last=True)  # a last chunk whose groups were all lost has no row
    return RecordedStep(
        step=chunks[0].step, incarnation=places[0].incarnation, digest=places[0].digest, at=places[0].at, chunks=tuple(chunks), payloads=tuple(payloads)
    )


def _group(row: Mapping[str, bytes | None], place: Mapping[str, Any], where: str) -> ExportedGroup:
    header, payload, record = _header(row, where), row["payload"], row["chunk_record"]
    try:
        payload = check_payload(header, payload)
        chunk = decode_chunk(record) if record is not None else None
        found = (
            StepPlace(chunk=chunk, incarnation=int(place["incarnation"]), digest=str(place["digest"]), at=float(place["trained_at"]))
            if chunk is not None
            else None
        )
    except (PayloadLost, DecodeError, TypeError, ValueError) as problem:
        raise DecodeError(where, str(problem)) from problem
    return ExportedGroup(header=header, payload=payload, place=found)


def _header(row: Mapping[str, bytes | None], where: str) -> GroupHeader:
    raw = row["header"]
    if raw is None:
        raise DecodeError(where, "has no header: not a row of an export")
    try:
        return decode(GroupHeader, raw)
    except DecodeError as problem:
        raise DecodeError(where, str(problem)) from problem


_Row = tuple[Mapping[str, Any], Mapping[str, bytes | None]]
"""(place in the journal, exact columns)"""


def _parquet_about(path: Path) -> bytes:
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            metadata: Mapping[bytes, bytes] = file.schema_arrow.metadata or {}
    except (pa.ArrowException, OSError) as problem:
        raise DecodeError(str(path), f"not a Parquet file ({problem})") from problem
    if _FORMAT.encode() not in metadata:
        raise DecodeError(str(path), "a Parquet file, but not one of `rollstream export`")
    return metadata[_FORMAT.encode()]


def _parquet_rows(path: Path, exact: Sequence[str]) -> Iterator[_Row]:
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=[*exact, *_PLACE]):
                for row in batch.to_pylist():
                    yield {name: row[name] for name in _PLACE}, {name: row[name] for name in exact}
    except (pa.ArrowException, OSError, KeyError) as problem:
        raise DecodeError(str(path), f"damaged ({problem})") from problem


def _jsonl_about(path: Path) -> bytes:
    with path.open("rb") as file:
        try:
            return orjson.dumps(orjson.loads(file.readline())[_FORMAT])
        except (ValueError, KeyError, TypeError) as problem:
            raise DecodeError(str(path), f"its first line is not that of `rollstream export` ({problem})") from problem


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 1):
            try:
                row = orjson.loads(line)
                exact = {name: None if row[name] is None else base64.b64decode(row[name], validate=True) for name in _EXACT}
                place = {name: row[name] for name in _PLACE}
            except (ValueError, KeyError, TypeError, binascii.Error) as problem:
                raise DecodeError(f"{path}, row {number}", f"not a row of an export ({type(problem).__name__}: {problem})") from problem
            yield place, exact
