"""Export and import: what comes back is what went out, byte for byte, and nothing of another run is taken for this run's by its number."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.contract import Granted
from buffer.exchange import Export, ExportedGroup, ExportWriter, rows_of
from buffer.importing import import_groups, plan_import
from buffer.recording import RecordingAbout
from buffer.redis_ledger import RedisLedger
from buffer.replay import JournalReader
from buffer.storage import Storage
from protocol.codec import decode_group, digest, encode, encode_group
from protocol.connection import Client
from protocol.errors import ConfigError, DecodeError, IdentityMismatch, RunEnded
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Edge, GroupHeader, Rollout, RolloutGroup, Span
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups

IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=2, dataset="rows", tokenizer="words")
FIRST = Version(1, 0)
FORMATS = pytest.mark.parametrize("suffix", ["parquet", "jsonl"])


def settings(**changes: object) -> BufferConfig:
    return BufferConfig.model_validate({"groups_per_step": 4, "pipeline_depth": 1.0, "chunk_groups": 2, "byte_budget": 100_000, "retention": 100} | changes)


def group(seq: int, *versions: Version) -> RolloutGroup:
    """Two rollouts, each begun by the first version and ended by the last."""
    rollouts = []
    for i in range(2):
        tokens = np.arange(6 + i, dtype=np.int32) + 10 * seq
        mask = np.array([0, 0] + [1] * (4 + i), dtype=np.uint8)
        spans = (Span(version=versions[0], start=2, end=4), Span(version=versions[-1], start=4, end=6 + i))
        rollouts.append(Rollout(tokens=tokens, mask=mask, logprobs=(mask * -0.1 * (seq + 1)).astype(np.float32), spans=spans, reward=seq + i / 2))
    return RolloutGroup(rollouts=tuple(rollouts))


async def produce(ledger: RedisLedger, n: int, *versions: Version) -> None:
    made = 0
    while made < n:
        granted = await ledger.reserve("p", f"{versions}-{made}", n - made, max_bytes=2000, served=versions[0])
        assert isinstance(granted, Granted), granted
        for slot in granted.slots:
            one = group(slot.seq, *versions)
            payload = encode_group(one)
            trainable: dict[Version, int] = {}
            for rollout in one.rollouts:
                for span in rollout.spans:
                    trainable[span.version] = trainable.get(span.version, 0) + span.end - span.start
            header = GroupHeader(
                seq=slot.seq,
                attempt=slot.attempt,
                token=slot.token,
                prompt_id=f"row-{slot.seq}",
                producer_id="p",
                group_size=2,
                lengths=(6, 7),
                trainable=trainable,
                oldest=min(trainable),
                rewards=tuple(rollout.reward for rollout in one.rollouts),
                payload_bytes=len(payload),
                payload_digest=digest(payload),
            )
            await ledger.put(header, payload)
            made += 1


async def train(ledger: RedisLedger, step: int) -> None:
    record = await ledger.open_step(1, step)
    for chunk in range(-(-record.groups // record.chunk)):
        await ledger.lease(1, step, chunk)
    await ledger.trained(1, step, f"w{step}", {})


@pytest_asyncio.fixture
async def source(redis: Client, keys: Keys) -> RedisLedger:
    """Two trained steps, the second of groups of two versions, and two READY groups."""
    ledger = RedisLedger(redis, keys)
    await ledger.create(IDENTITY, settings())
    await ledger.attach(None, trainer_id="t")
    await produce(ledger, 4, FIRST)
    await train(ledger, 1)
    await produce(ledger, 4, FIRST, Version(1, 1))
    await train(ledger, 2)
    await produce(ledger, 2, Version(1, 2))
    return ledger


@dataclasses.dataclass
class Target:
    ledger: RedisLedger
    keys: Keys
    waker: Wakeups

    async def put(self, export: Export, *, as_version: str | None = None, identity: RunIdentity = IDENTITY) -> int:
        plan = await plan_import(export, self.ledger, run=self.keys.run, identity=identity, as_version=as_version)
        return await import_groups(export, plan, self.ledger, self.waker, asyncio.Event(), on_blocked=lambda _: None)


@pytest_asyncio.fixture
async def target(redis: Client, keys: Keys) -> AsyncIterator[Target]:
    """Another run in the same Redis, its trainer at the starting weights."""
    other = Keys(f"{keys.run}-b")
    ledger = RedisLedger(redis, other)
    await ledger.create(IDENTITY, settings(groups_per_step=8))
    await ledger.attach(None, trainer_id="t")
    async with wakeups(redis, other) as waker:
        yield Target(ledger=ledger, keys=other, waker=waker)


def about(keys: Keys) -> RecordingAbout:
    return RecordingAbout(run=keys.run, identity=IDENTITY, settings=settings())


async def export_steps(ledger: RedisLedger, path: Path, keys: Keys, *steps: int) -> Export:
    reader = JournalReader(ledger, Storage())
    with ExportWriter(path, about(keys)) as out:
        for step in steps:
            out.write(list(rows_of(await reader.read(step))))
    return Export(path)


async def export_ready(ledger: RedisLedger, path: Path, keys: Keys) -> Export:
    headers = await ledger.ready(100)
    with ExportWriter(path, about(keys)) as out:
        out.write([ExportedGroup(header=h, payload=p) for h, p in zip(headers, await ledger.payloads(headers), strict=True)])
    return Export(path)


@FORMATS
async def test_exported_steps_are_the_journal_byte_for_byte_and_can_be_read_by_others(source: RedisLedger, keys: Keys, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"steps.{suffix}"
    export = await export_steps(source, path, keys, 1, 2)
    assert export.about == about(keys)
    reader = JournalReader(source, Storage())
    for found, step in zip(export.steps(settings()), (1, 2), strict=True):
        expected = await reader.read(step)
        assert (found.step, found.incarnation, found.digest, found.at) == (expected.step, expected.incarnation, expected.digest, expected.at)
        assert found.chunks == expected.chunks
        assert [encode(header) for chunk in found.chunks for header in chunk.headers] == [encode(h) for chunk in expected.chunks for h in chunk.headers]
        assert found.payloads == expected.payloads
    if suffix == "jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [(row["step"], row["chunk"], row["seq"]) for row in rows] == [(1 + i // 4, i % 4 // 2, i) for i in range(8)]
    last = group(7, FIRST, Version(1, 1))
    assert rows[7]["token_ids"] == [rollout.tokens.tolist() for rollout in last.rollouts]
    assert rows[7]["mask"] == [rollout.mask.tolist() for rollout in last.rollouts]
    assert np.allclose(rows[7]["logprobs"][1], last.rollouts[1].logprobs)
    assert rows[7]["versions"][1] == [{"version": "1:0", "start": 2, "end": 4}, {"version": "1:1", "start": 4, "end": 7}]
    assert (rows[7]["rewards"], rows[7]["prompt_id"], rows[7]["digest"]) == ([7.0, 7.5], "row-7", "w2")


@FORMATS
async def test_kept_versions_bring_the_very_payloads_into_another_run_and_it_trains_them(
    source: RedisLedger, target: Target, keys: Keys, tmp_path: Path, suffix: str
) -> None:
    export = await export_steps(source, tmp_path / f"one.{suffix}", keys, 1)
    with pytest.raises(ConfigError, match=rf"of run '{keys.run}'.*other weights.*--as-version keep"):
        await target.put(export)
    assert await target.put(export, as_version="keep") == 4

    headers = await target.ledger.ready(100)
    rows = list(export.groups())
    assert await target.ledger.payloads(headers) == tuple(row.payload for row in rows)
    for header, row in zip(headers, rows, strict=True):
        placed = dataclasses.replace(row.header, seq=header.seq, attempt=header.attempt, token=header.token, producer_id="import", metadata=header.metadata)
        assert header == placed
        assert header.metadata["imported"] == f"{keys.run}:{row.header.seq}:{row.header.attempt}"
    back = await export_ready(target.ledger, tmp_path / f"back.{suffix}", target.keys)
    assert [row.payload for row in back.groups()] == [row.payload for row in rows]
    assert {row.place for row in back.groups()} == {None}


async def test_groups_come_back_into_their_own_run_without_a_word_about_versions(source: RedisLedger, keys: Keys, redis: Client, tmp_path: Path) -> None:
    export = await export_steps(source, tmp_path / "two.jsonl", keys, 2)
    async with wakeups(redis, keys) as waker:
        own = Target(ledger=source, keys=keys, waker=waker)
        assert await own.put(export) == 4
    assert (await source.status()).ready == 6


@FORMATS
async def test_unknown_versions_are_refused_before_anything_is_put_and_are_named_anew_only_when_asked(
    source: RedisLedger, target: Target, keys: Keys, tmp_path: Path, suffix: str
) -> None:
    export = await export_ready(source, tmp_path / f"ready.{suffix}", keys)
    for how in (None, "keep"):
        with pytest.raises(ConfigError, match=r"groups of version 1:2, which run .* does not have \(its newest is 1:0\): give --as-version newest"):
            await target.put(export, as_version=how)
    with pytest.raises(ConfigError, match=r"--as-version 1:5: .* has no such version; its newest is 1:0"):
        await target.put(export, as_version="1:5")
    with pytest.raises(ConfigError, match=r"--as-version 'soon': expected a version"):
        await target.put(export, as_version="soon")
    assert (await target.ledger.status()).next_seq == 0

    assert await target.put(export, as_version="newest") == 2
    headers = await target.ledger.ready(10)
    for header, row in zip(headers, export.groups(), strict=True):
        assert (dict(header.trainable), header.oldest) == ({FIRST: sum(row.header.trainable.values())}, FIRST)
        renamed, before = decode_group(await target.ledger.payload(header)), decode_group(row.payload)
        for mine, theirs in zip(renamed.rollouts, before.rollouts, strict=True):
            assert {span.version for span in mine.spans} == {FIRST}
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


async def test_an_import_waits_for_slots_and_says_so_and_is_refused_what_the_guard_would_refuse(
    source: RedisLedger, target: Target, keys: Keys, tmp_path: Path, redis: Client
) -> None:
    small = Keys(f"{keys.run}-c")
    ledger = RedisLedger(redis, small)
    await ledger.create(IDENTITY, settings(groups_per_step=2, chunk_groups=2, pipeline_depth=0.5, max_staleness=1))
    await ledger.attach(None, trainer_id="t")
    export = await export_steps(source, tmp_path / "all.jsonl", keys, 1, 2)
    edges: list[Edge] = []
    async with wakeups(redis, small) as waker:
        plan = await plan_import(export, ledger, run=small.run, identity=IDENTITY, as_version="1:0")
        putting = asyncio.create_task(import_groups(export, plan, ledger, waker, asyncio.Event(), on_blocked=edges.append))
        async with asyncio.timeout(100):
            while Edge.NO_SLOT not in edges:
                await waker.wait(Topic.READY, timeout_s=0.05)
            assert (await ledger.status()).ready == 3
            await ledger.open_step(1, 1)
            await ledger.lease(1, 1, 0)
            await ledger.trained(1, 1, "w1", {})
            with pytest.raises(ConfigError, match=r"was written by 1:0, which is too old for the run by now.* the 4 of 8 groups before it .* stay"):
                await putting
    status = await ledger.status()
    assert (status.ready, status.generating) == (2, 0), "what was put before stays"


async def test_an_import_as_the_newest_version_follows_a_run_that_trains_meanwhile(source: RedisLedger, keys: Keys, tmp_path: Path, redis: Client) -> None:
    small = Keys(f"{keys.run}-c")
    ledger = RedisLedger(redis, small)
    await ledger.create(IDENTITY, settings(groups_per_step=2, chunk_groups=2, pipeline_depth=0.0, max_staleness=0))
    await ledger.attach(None, trainer_id="t")
    export = await export_steps(source, tmp_path / "all.jsonl", keys, 1, 2)
    async with wakeups(redis, small) as waker, asyncio.timeout(100):
        plan = await plan_import(export, ledger, run=small.run, identity=IDENTITY, as_version="newest")
        putting = asyncio.create_task(import_groups(export, plan, ledger, waker, asyncio.Event(), on_blocked=lambda _: None))
        for step in (1, 2, 3, 4):
            while (await ledger.status()).ready < 2:
                await waker.wait(Topic.READY, timeout_s=0.05)
            assert {header.oldest for header in await ledger.ready(10)} == {Version(1, step - 1)}
            await train(ledger, step)
        assert await putting == 8


async def test_what_a_stop_cuts_short_holds_no_slot_and_a_run_that_ends_says_so(source: RedisLedger, target: Target, keys: Keys, tmp_path: Path) -> None:
    export = await export_steps(source, tmp_path / "one.jsonl", keys, 1)
    stop = asyncio.Event()
    stop.set()
    plan = await plan_import(export, target.ledger, run=target.keys.run, identity=IDENTITY, as_version="keep")
    assert await import_groups(export, plan, target.ledger, target.waker, stop, on_blocked=lambda _: None) == 0
    await target.ledger.drain(1, "test")
    with pytest.raises(RunEnded):
        await target.put(export, as_version="keep")
    status = await target.ledger.status()
    assert (status.generating, status.ready) == (0, 0)


async def test_groups_of_another_tokenizer_or_size_have_no_use_in_a_run(source: RedisLedger, target: Target, keys: Keys, tmp_path: Path) -> None:
    export = await export_steps(source, tmp_path / "one.jsonl", keys, 1)
    with pytest.raises(IdentityMismatch, match=r"differs from run .* in tokenizer and group_size"):
        await target.put(export, as_version="newest", identity=dataclasses.replace(IDENTITY, tokenizer="other", group_size=3))


async def test_a_file_that_is_damaged_or_none_of_ours_names_the_row(source: RedisLedger, keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    await export_steps(source, path, keys, 1)
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    payload: Any = row["payload"]
    (tmp_path / "bad.jsonl").write_text("\n".join([lines[0], lines[1], json.dumps({**row, "payload": "AAAA" + payload[4:]})]) + "\n")
    with pytest.raises(DecodeError, match=r"bad.jsonl, row 2: .*do not match digest"):
        list(Export(tmp_path / "bad.jsonl").groups())
    (tmp_path / "cut.jsonl").write_text("\n".join([lines[0], lines[1][:-9]]))
    with pytest.raises(DecodeError, match=r"cut.jsonl, row 1"):
        list(Export(tmp_path / "cut.jsonl").groups())
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DecodeError, match="not that of `rollstream export`"):
        Export(tmp_path / "other.jsonl")
    (tmp_path / "other.parquet").write_bytes(b"PAR0")
    with pytest.raises(DecodeError, match="not a Parquet file"):
        Export(tmp_path / "other.parquet")
    for name, words in (("none.jsonl", "no such file"), ("groups.csv", "ends in .parquet or .jsonl")):
        with pytest.raises(ConfigError, match=words):
            Export(tmp_path / name)


@FORMATS
def test_an_export_that_fails_leaves_no_file_and_what_was_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    path.write_text("before")
    with pytest.raises(RuntimeError, match="stop"), ExportWriter(path, about(Keys("r"))):
        raise RuntimeError("stop")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "before"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[parquet\]'.*\.jsonl"):
        ExportWriter(tmp_path / "a.parquet", about(Keys("r")))
