"""Rule R1 from end to end: a real Redis is killed and comes back with an older copy of its data, and the trainer tells it what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from buffer import redis_ledger
from buffer.audit import read_audit
from buffer.client import ProducerBuffer
from buffer.config import BufferConfig
from buffer.contract import CheckpointRef, LedgerStatus
from buffer.ledger import PureLedger
from buffer.redis_ledger import RedisLedger
from buffer.report import totals
from buffer.witness import WitnessLine, read_witness
from consumer.checkpoint import checkpoints_on_disk
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.loop import TrainingLoop
from consumer.mending import Mender, beyond, swept
from deploy.redis_server import server_command, wait_ready
from protocol.codec import encode_group
from protocol.config import validate
from protocol.connection import Client, connect
from protocol.errors import DecodeError, LedgerRegressed, RedisUnavailable, RunEnded, RunMissing, SlotLost
from protocol.failpoints import Failpoint
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys
from protocol.versions import Fork, Lineage
from protocol.wakeups import Topic, wakeups
from weightsync.channel import Channel

from .conftest import Sampler, header_of, serve_newest

pytestmark = [pytest.mark.redis, pytest.mark.faults, pytest.mark.timeout(600)]


class Server:
    """A Redis of the test's own that can be killed, and set back to a copy of its data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder.with_name("copy")
        self.command = server_command(folder, appendfsync="always")  # what it has acknowledged is in the file that is copied
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._process = await asyncio.create_subprocess_exec(*self.command.argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
        await wait_ready(self.command.url, timeout_s=120.0)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
        self.command.socket.unlink(missing_ok=True)

    async def remember(self) -> None:
        """A copy of the data as they lie on the disk now; a command cut in its middle is dropped when it is loaded."""
        await asyncio.to_thread(shutil.copytree, self.folder / "appendonlydir", self.copy)

    async def go_back(self) -> None:
        """kill -9, and the older data in its place: what was acknowledged since the copy is lost."""
        await self.kill()
        await asyncio.to_thread(shutil.rmtree, self.folder / "appendonlydir")
        await asyncio.to_thread(shutil.copytree, self.copy, self.folder / "appendonlydir")
        await self.start()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "redis")
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    client = connect(server.command.url, deadline_s=60.0)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def run(server: Server, make_config: Callable[..., Any]) -> Callable[..., TrainerDaemonConfig]:
    def configured(**changes: Any) -> TrainerDaemonConfig:
        tables = make_config(**({"checkpoint__every_steps": 2} | changes))
        tables["redis"]["url"] = server.command.url
        config = validate(TrainerDaemonConfig, tables, source="test")
        config.check()
        return config

    return configured


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], asyncio.Event]:
    """`go = hold(step)`: no trainer begins that step before `go.set()`, so nothing that must come before it can come too late."""
    held: dict[int, asyncio.Event] = {}
    take = TrainingLoop._take

    async def when_let_go(loop: TrainingLoop, step: int, index: int) -> Any:
        if step in held:
            await held[step].wait()
        return await take(loop, step, index)

    monkeypatch.setattr(TrainingLoop, "_take", when_let_go)
    return lambda step: held.setdefault(step, asyncio.Event())


async def train(config: TrainerDaemonConfig, client: Client, *, new: bool = True, **options: Any) -> None:
    keys = Keys(config.run.name)
    identity = identify(config.run, config.model, config.data, config.rollout)
    await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity if new else None, **options)


async def produce(client: Client, keys: Keys, sampler: Sampler) -> None:
    """A producer that lives through all of it, one group at a time."""
    ledger = RedisLedger(client, keys)
    async with wakeups(client, keys) as waker:
        buffer = ProducerBuffer(ledger, waker, "test-producer")
        while True:
            mark = waker.mark(Topic.RUN)
            try:
                (slot,) = await buffer.reserve(1, 1 << 14)
                group = sampler.group(slot.seq, version=slot.min_version)
                payload = encode_group(group)
                await buffer.put(header_of(group, seq=slot.seq, attempt=slot.attempt, token=slot.token, payload=payload), payload)
            except (RunMissing, RunEnded):
                await waker.wait(Topic.RUN, since=mark)
            except (LedgerRegressed, SlotLost, DecodeError, RedisUnavailable):
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def around(client: Client, keys: Keys, sampler: Sampler) -> AsyncIterator[asyncio.TaskGroup]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(produce(client, keys, sampler)), group.create_task(_serve(client, keys))]
            yield group
            for task in tasks:
                task.cancel()
    finally:  # a put that its caller no longer waits for
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "ledger:group-commit"))


async def _serve(client: Client, keys: Keys) -> None:
    while True:
        with contextlib.suppress(RedisUnavailable):
            await serve_newest(client, keys)


async def reached(client: Client, keys: Keys, step: int) -> LedgerStatus:
    ledger = RedisLedger(client, keys)
    while True:
        with contextlib.suppress(RunMissing):
            if (status := await ledger.status()).trained >= step:
                return status
        await asyncio.sleep(0.02)


async def verdict(config: TrainerDaemonConfig, client: Client, steps: int) -> list[WitnessLine]:
    """Nothing lost, nothing trained twice, by witness, audit and ledger; the witness."""
    keys = Keys(config.run.name)
    witness = read_witness(config.run.folder / "witness.jsonl")
    status = await RedisLedger(client, keys).status()
    report = totals(await read_audit(config.run.folder / "audit.jsonl", client, keys), witness, status)
    assert report.disagreements == ()
    assert (status.trained, status.trained_groups) == (steps, 4 * steps)
    assert (report.groups_trained, report.groups_lost, report.groups_duplicated, report.steps_trained) == (4 * steps, 0, 0, steps)
    return witness


async def test_a_running_trainer_goes_on_with_the_same_step_and_trains_nothing_twice(
    server: Server, client: Client, sampler: Sampler, run: Callable[..., TrainerDaemonConfig], hold: Callable[[int], asyncio.Event]
) -> None:
    config = run(stop__steps=14)
    keys = Keys(config.run.name)
    copied, went_back = hold(6), hold(14)
    async with asyncio.timeout(400), around(client, keys, sampler) as group:
        trainer = group.create_task(train(config, client))
        await reached(client, keys, 3)
        await server.remember()
        copied.set()
        await reached(client, keys, 7)
        await server.go_back()
        went_back.set()
        await trainer
        witness = await verdict(config, client, 14)
    assert [(line.incarnation, line.step) for line in witness] == [(1, step) for step in range(1, 15)], "no step was computed again"
    events = await read_audit(config.run.folder / "audit.jsonl", client, keys)
    assert [event.op for event in events].count("regressed") == 1
    status = await RedisLedger(client, keys).status()
    assert {path.name for path in config.checkpoint_folder.iterdir()} == {Path(one.path).name for one in status.checkpoints}
    assert str(await Channel(client, keys).newest_version()) == "1:14"


@pytest.mark.parametrize("at", ["between two chunks", "under the optimizer"])
async def test_a_step_that_was_under_way_while_somebody_elses_call_had_the_ledger_mended_counts_once(
    server: Server, client: Client, sampler: Sampler, run: Callable[..., TrainerDaemonConfig], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A checkpoint that is being registered may be the first to hear that Redis went back; what the loop holds then is of before."""
    config = run(stop__steps=6)
    keys = Keys(config.run.name)
    ledger, take, trained = RedisLedger(client, keys), TrainingLoop._take, Mender.trained
    staged: list[str] = []

    async def mend_elsewhere(mender: Mender) -> None:
        staged.append(at)
        await server.go_back()
        await mender.mend(LedgerRegressed("staged"), since=mender.mended)

    async def take_late(loop: TrainingLoop, step: int, index: int) -> Any:
        if (step, index) == (3, 0) and not staged:
            await server.remember()
        if (step, index) == (3, 1) and not staged and at == "between two chunks":
            await mend_elsewhere(loop._parts.mender)
        return await take(loop, step, index)

    async def trained_late(mender: Mender, incarnation: int, step: int, *rest: Any, **options: Any) -> Any:
        if step == 3 and not staged and at == "under the optimizer":
            newest, mender._newest = mender._newest, 2  # as the call that came before `stepped` knew it
            await mend_elsewhere(mender)
            mender._newest = newest
            status = await ledger.status()
            assert (status.trained, status.leased) == (2, 0), "the mended ledger knows nothing of the step that is being trained"
        return await trained(mender, incarnation, step, *rest, **options)

    monkeypatch.setattr(TrainingLoop, "_take", take_late)
    monkeypatch.setattr(Mender, "trained", trained_late)
    async with asyncio.timeout(400), around(client, keys, sampler):
        await train(config, client)
        witness = await verdict(config, client, 6)
    assert staged == [at]
    assert [(line.incarnation, line.step) for line in witness] == [(1, step) for step in range(1, 7)]


async def test_a_resumed_trainer_tells_the_ledger_of_the_checkpoint_that_it_lost(
    server: Server, client: Client, sampler: Sampler, run: Callable[..., TrainerDaemonConfig], hold: Callable[[int], asyncio.Event]
) -> None:
    keys = Keys(run().run.name)
    copied = hold(6)
    async with asyncio.timeout(400), around(client, keys, sampler) as group:
        trainer = group.create_task(train(run(stop__steps=8), client))
        await reached(client, keys, 3)
        await server.remember()
        copied.set()
        await trainer
        await server.go_back()
        assert (await RedisLedger(client, keys).status()).trained < 8
        await train(run(stop__steps=12), client, new=False)
        witness = await verdict(run(), client, 12)
    assert [(line.incarnation, line.step) for line in witness] == [(1, step) for step in range(1, 9)] + [(2, step) for step in range(9, 13)]
    status = await RedisLedger(client, keys).status()
    assert status.lineage.forks[2].step == 8
    assert str(await Channel(client, keys).newest_version()) == "2:12"


async def test_a_resumed_trainer_goes_on_from_checkpoints_whose_registration_alone_was_lost(
    server: Server, client: Client, sampler: Sampler, run: Callable[..., TrainerDaemonConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is still trained in the ledger, and those that it has registered were deleted for the ones that it has not."""
    config = run(stop__steps=7)
    keys, register = Keys(config.run.name), RedisLedger.checkpoint

    async def held(self: RedisLedger, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        if checkpoint.step == 6:
            await reached(client, keys, 7)
            await server.remember()
        return await register(self, incarnation, checkpoint, keep=keep)

    async with asyncio.timeout(400), around(client, keys, sampler):
        with monkeypatch.context() as patch:
            patch.setattr(RedisLedger, "checkpoint", held)
            await train(config, client)
        await server.go_back()
        status = await RedisLedger(client, keys).status()
        assert (status.trained, [one.step for one in status.checkpoints]) == (7, [2, 4])
        assert [one.step for one in checkpoints_on_disk(config.checkpoint_folder)] == [6, 7]
        await train(run(stop__steps=10), client, new=False)
        witness = await verdict(config, client, 10)
    assert [(line.incarnation, line.step) for line in witness] == [(1, step) for step in range(1, 8)] + [(2, step) for step in range(8, 11)]


def test_files_that_are_gone_prove_a_loss_only_where_later_ones_are_there(tmp_path: Path) -> None:
    """Registered are 2 and 4 of seven trained steps."""
    two, four, six = (CheckpointRef(step=step, incarnation=1, digest="", path=str(tmp_path / f"step-00000{step}-1")) for step in (2, 4, 6))
    empty = PureLedger(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="", tokenizer=""), BufferConfig()).status(0)
    status = dataclasses.replace(empty, incarnation=1, trained=7, checkpoints=(two, four), lineage=Lineage({1: Fork(0, 0)}, 1))
    for folder in (four, six):
        Path(folder.path).mkdir()
    assert swept(status, [two, four]) == ()
    assert swept(status, [four, six]) == (two,)
    assert swept(status, [six]) == (two,), "4 is where it was registered, which is not where this run looks for checkpoints"
    assert beyond(status, [two, four, six]) is None, "saved, and its trainer died before it could register it"
    assert beyond(status, [four, six], [two]) == six
    assert beyond(status, [four], [two]) is None
    later = dataclasses.replace(status, incarnation=3, lineage=Lineage({1: Fork(0, 0), 2: Fork(1, 4), 3: Fork(1, 7)}, 3))
    assert beyond(later, [four, dataclasses.replace(six, incarnation=2)], [two]) is None, "it is of a line that was given up"
    assert beyond(later, [four, six], [two]) == six


async def test_a_trainer_that_died_while_it_told_the_ledger_again_is_followed_by_one_that_does(
    server: Server,
    client: Client,
    sampler: Sampler,
    run: Callable[..., TrainerDaemonConfig],
    monkeypatch: pytest.MonkeyPatch,
    hold: Callable[[int], asyncio.Event],
) -> None:
    """Half told, the ledger knows the last incarnation, and neither its steps nor its checkpoint."""
    config = run(stop__steps=6)
    keys = Keys(config.run.name)

    copied, went_back = hold(5), hold(12)

    class Died(Exception):
        pass

    def die(at: Failpoint) -> None:
        if at is Failpoint.TRAINER_REASSERTING:
            raise Died

    async with asyncio.timeout(400), around(client, keys, sampler):
        first = asyncio.create_task(train(config, client))
        await reached(client, keys, 3)
        await server.remember()
        copied.set()
        await first
        config = run(stop__steps=12)
        with monkeypatch.context() as patch:
            patch.setattr(redis_ledger, "failpoint", die)
            second = asyncio.create_task(train(config, client, new=False))
            await reached(client, keys, 7)
            await server.go_back()
            went_back.set()
            with pytest.raises(BaseExceptionGroup) as problems:
                await second
            assert problems.group_contains(Died)
        status = await RedisLedger(client, keys).status()
        assert (status.incarnation, status.checkpoints) == (2, ())
        await train(config, client, new=False)
        witness = await verdict(config, client, 12)
    assert {line.incarnation for line in witness} == {1, 2, 3}
    assert min(line.step for line in witness if line.incarnation == 3) == 7, "it went on from the checkpoint of step 6"


async def test_going_back_with_abandon_generates_anew_what_followed(
    server: Server, client: Client, sampler: Sampler, run: Callable[..., TrainerDaemonConfig]
) -> None:
    keys = Keys(run().run.name)
    async with asyncio.timeout(400), around(client, keys, sampler):
        await train(run(stop__steps=6), client)
        first = {line.step: line.seqs for line in read_witness(run().run.folder / "witness.jsonl")}
        await train(run(stop__steps=9), client, new=False, from_step=4, abandon=True)
        witness = await verdict(run(), client, 9)
    again = {line.step: line for line in witness if line.incarnation == 2}
    assert sorted(again) == [5, 6, 7, 8, 9]
    assert {seq for line in again.values() for seq in line.seqs} >= {seq for step in (5, 6) for seq in first[step]}
    events = await read_audit(run().run.folder / "audit.jsonl", client, keys)
    released = [event.fields["seq"] for event in events if event.op == "released" and event.fields["reason"] == "rewound"]
    assert set(first[5] + first[6]) <= set(released)
