"""Rank 0 and another rank with a backend that computes nothing: who does what, in which order, and how an error of either ends both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.contract import CheckpointRef, ChunkRecord, StepRecord
from consumer.backend import Backend, StepReport, TrainingState
from consumer.batch import ChunkBatch
from consumer.checkpoint import Checkpoint, CheckpointDamaged, Progress, read_checkpoint, write_checkpoint
from consumer.journal import JournalTail
from consumer.parts import Place
from consumer.ranks import process_group
from consumer.ranks.channel import Call, Line, RankFailed, RankLost
from consumer.ranks.follower import Follower, knock, line_to_rank_0
from consumer.ranks.hub import Hub
from consumer.ranks.leader import RankedBackend, RankedCrew
from consumer.ranks.place import Place as RankPlace
from consumer.worker import Worker
from protocol.errors import EXIT_TRY_AGAIN, LedgerRegressed, RollstreamError
from weightsync.snapshot import TensorBytes


class Recording:
    """Satisfies `consumer.backend.Backend`; `broken` is a call that fails."""

    reads_its_part = True

    def __init__(self, broken: str = "", part: tuple[int, int] = (0, 2)) -> None:
        self.part = part
        self.calls: list[Any] = []
        self.broken = broken

    def _note(self, call: str, *what: Any) -> None:
        if call == self.broken:
            raise ValueError(f"no {call} today")
        self.calls.append((call, *what) if what else call)

    def accumulate(self, batch: ChunkBatch) -> None:
        self._note("accumulate", *batch.seqs)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        self._note("finish_step", step, divisor)
        return StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)

    def abandon_step(self) -> None:
        self._note("abandon_step")

    def snapshot(self) -> dict[str, Any]:
        self._note("snapshot")
        return {}

    def capture(self) -> TrainingState:
        """One of the numbers in `both`."""
        self._note("capture")
        rank = self.part[0]
        mine = TensorBytes(dtype="U8", shape=(1,), data=bytes([rank]))
        places = {"weights": {"both": Place(start=(rank,), whole=(2,))}}
        return TrainingState(weights={"both": mine}, optimizer={}, rng={"own": bytes([rank])}, part=self.part, places=places)

    def restore(self, state: TrainingState) -> None:
        self._note("restore", *bytes(state.weights["both"].data), *state.rng["own"])


class Shares:
    """The buffer of one rank; `lost`: the ledger regressed. It agrees with the others, as the real one does, and waits where it is told to."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups, self.lost, self.go = groups, False, asyncio.Event()
        self.go.set()
        self.asked: list[int] = []

    async def fetch_share(self, chunk: ChunkRecord, share: Any, agree: Callable[[int], Any], on_blocked: Any = None) -> tuple[ChunkRecord, list[Any]]:
        self.asked.append(chunk.chunk)
        await self.go.wait()
        if self.lost:
            raise LedgerRegressed("the step is not there")
        assert await agree(chunk.revision) == (chunk.revision, chunk.revision)
        mine = {header.seq for header in share.of(chunk.headers)}
        return chunk, [group for group in self.groups if group[0].seq in mine]


def told(seqs: tuple[int, ...]) -> ChunkBatch:
    return ChunkBatch(
        groups=(), seqs=seqs, rewards=tuple(4 * [1.0] * len(seqs)), tokens=len(seqs), masked=0, staleness={}, group_staleness={}, response_tokens=0, divisor=0.5
    )  # type: ignore[arg-type]


def collate(taken: Any) -> list[ChunkBatch]:
    return [told(tuple(header.seq for header, _ in groups)) for _, groups in taken]


class Pair:
    def __init__(
        self, hub: Hub, ranked: RankedBackend, worker: Worker, both: tuple[Recording, Recording], shares: tuple[Shares, Shares], following: Any
    ) -> None:
        self.hub, self.ranked, self.worker, self.shares, self.following = hub, ranked, worker, shares, following
        self.mine, self.other = both
        self.crew = RankedCrew(shares[0], ranked, hub, RankPlace(rank=0, ranks=2, local_rank=0, host="127.0.0.1", port=1))  # type: ignore[arg-type]


async def followed(follower: Follower, line: Line) -> None:
    try:
        await follower.run()
    finally:
        await line.close()


@contextlib.asynccontextmanager
async def pair(groups: list[Any], *, broken: str = "", here: str = "", makes_s: float = 0.0) -> AsyncIterator[Pair]:
    """Rank 0, and rank 1 in a task, which takes so long to make its backend."""
    mine, other, shares = Recording(here), Recording(broken, (1, 2)), (Shares(groups), Shares(groups))
    place = RankPlace(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=1)

    async def open_buffer(_incarnation: int) -> Any:
        return shares[1]

    def make() -> Any:
        time.sleep(makes_s)
        return other

    async with asyncio.timeout(100), Worker() as worker, Worker() as others_worker, Hub(2, "127.0.0.1") as hub:
        line = await knock(RankPlace(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=1), hub.port, hub.token)
        assert line is not None
        follower = Follower(place, line, others_worker, make=make, open_buffer=open_buffer, collate=collate)
        following = asyncio.create_task(followed(follower, line))
        try:
            await hub.gather(60)
            ranked = RankedBackend(hub, asyncio.get_running_loop(), 2)
            await worker.call(ranked.make, lambda: mine)
            await hub.ask(Call.BEGIN, incarnation=1)
            yield Pair(hub, ranked, worker, (mine, other), shares, following)
            if not following.done():
                await hub.stop(60)
                await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@pytest.fixture
def groups(sampler: Any) -> list[Any]:
    return [sampler.headed(seq) for seq in range(5)]


@pytest.fixture
def chunk_at(make_record: Callable[..., StepRecord], groups: list[Any]) -> Callable[[int], ChunkRecord]:
    return lambda at: ChunkRecord(step=1, chunk=at, revision=3, headers=tuple(header for header, _ in groups), last=False, record=make_record())


async def trained(both: Pair, chunk: ChunkRecord) -> list[ChunkBatch]:
    found, groups = await both.crew.fetch(chunk, lambda _edge: None)
    collated = await both.worker.call(both.crew.collate, [found], lambda: collate([(found, groups)]))
    for one in collated:
        await both.worker.call(both.ranked.accumulate, one.mine)
    return [one.told for one in collated]


async def test_all_ranks_do_what_rank_0_is_asked_each_on_its_share(groups: list[Any], chunk_at: Callable[[int], ChunkRecord]):
    async with pair(groups) as both:
        batches = [one for at in (0, 1) for one in await trained(both, chunk_at(at))]
        assert [batch.seqs for batch in batches] == [(0, 1, 2, 3, 4)] * 2, "told as a whole, in the chunk's order"
        assert [(batch.tokens, batch.divisor) for batch in batches] == [(5, 1.0)] * 2
        await both.worker.call(both.ranked.finish_step, 1, 2.0)
        for call in (both.ranked.snapshot, both.ranked.digest, both.ranked.capture):
            await both.worker.call(call)
        await both.worker.call(both.ranked.abandon_step)
    assert [call if isinstance(call, str) else call[0] for call in both.mine.calls] == [call if isinstance(call, str) else call[0] for call in both.other.calls]
    assert both.other.calls[2] == ("finish_step", 1, 2.0)
    mine, others = ({seq for call in one.calls if call[0] == "accumulate" for seq in call[1:]} for one in (both.mine, both.other))
    assert mine | others == {0, 1, 2, 3, 4}
    assert not mine & others
    assert others


async def saved(both: Pair, folder: Path, model_path: Path) -> CheckpointRef:
    state = await both.worker.call(both.ranked.capture)
    checkpoint = Checkpoint(progress=Progress(step=1), incarnation=1, state=state, journal=JournalTail().dump(), schedule={})
    return await asyncio.to_thread(write_checkpoint, folder, checkpoint, model_path=model_path, others=both.crew.write)


async def test_every_rank_writes_its_part_while_others_train_and_reads_the_whole(
    groups: list[Any], chunk_at: Callable[[int], ChunkRecord], model_path: Path, tmp_path: Path
):
    async with pair(groups) as both:
        writing = asyncio.create_task(saved(both, tmp_path, model_path))
        await trained(both, chunk_at(0))
        reference = await writing
        files = sorted(path.name for path in (Path(reference.path) / "shards").iterdir())
        assert files == ["weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"]
        await both.worker.call(both.ranked.restore, read_checkpoint(reference, folder=tmp_path, share=(0, both.ranked.readers)).state)
    assert (both.mine.calls[-1], both.other.calls[-1]) == (("restore", 0, 1, 0), ("restore", 0, 1, 1)), "all of the tensor, and each its own random state"


@pytest.mark.parametrize("damage", [1, 2])
async def test_files_are_verified_by_the_ranks_together(groups: list[Any], model_path: Path, tmp_path: Path, damage: int):
    """`damage`: which file. Rank 0 verifies the journal and the second, rank 1 the first."""
    with pytest.raises((CheckpointDamaged, RankFailed), match=r"weights-0000.-of-00002\.safetensors has checksum") as raised:  # noqa: PT012 - either of two calls
        async with pair(groups) as both:
            reference = await saved(both, tmp_path, model_path)
            file = Path(reference.path) / "shards" / f"weights-0000{damage}-of-00002.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"!")
            state = read_checkpoint(reference, folder=tmp_path, share=(0, both.ranked.readers)).state
            await both.worker.call(both.ranked.restore, state)
    assert (type(raised.value), raised.value.exit_code) == ((RankFailed if damage == 1 else CheckpointDamaged), 2)


async def test_a_rank_that_cannot_write_its_part_ends_all_with_its_message_and_leaves_nothing(
    groups: list[Any], model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(_folder: Path, _state: TrainingState) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("consumer.ranks.follower.write_shards", full)
    with pytest.raises(RankFailed, match=r"rank 1: the checkpoint cannot be written to .*No space left.*checkpoint\.dir"):
        async with pair(groups) as both:
            await saved(both, tmp_path, model_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_command_that_comes_while_the_backend_is_being_made_waits_for_it(groups: list[Any]):
    async with pair(groups, makes_s=0.2) as both:
        await both.worker.call(both.ranked.abandon_step)
        assert both.other.calls == ["abandon_step"]


@pytest.mark.parametrize("call", ["accumulate", "finish_step", "snapshot"])
async def test_a_rank_that_raises_ends_rank_0_with_its_message(groups: list[Any], chunk_at: Callable[[int], ChunkRecord], call: str):
    with pytest.raises(RankFailed, match=f"rank 1: ValueError: no {call} today") as raised:  # noqa: PT012 - whichever of the calls it is
        async with pair(groups, broken=call) as both:
            await trained(both, chunk_at(0))
            await both.worker.call(both.ranked.finish_step, 1, 2.0)
            await both.worker.call(both.ranked.snapshot)
    assert raised.value.exit_code == 1
    with pytest.raises(ExceptionGroup) as ended:
        await both.following
    assert ended.group_contains(ValueError, match=call)
    with pytest.raises(RankFailed):
        await both.hub.ask(Call.CAPTURE)


async def test_an_error_of_rank_0_ends_the_others_with_its_message(groups: list[Any], chunk_at: Callable[[int], ChunkRecord]):
    with pytest.raises(ValueError, match="no accumulate today"):  # noqa: PT012 - with what the other rank says of it
        async with pair(groups, here="accumulate") as both:
            try:
                await trained(both, chunk_at(0))
            except ValueError as problem:
                both.hub.end(problem)
                with pytest.raises(ExceptionGroup) as ended:
                    await both.following
                raise
    assert ended.group_contains(RankLost, match="rank 0 ends: ValueError: no accumulate today")


async def test_a_regressed_ledger_seen_by_one_rank_is_rank_0_s_to_mend(groups: list[Any], chunk_at: Callable[[int], ChunkRecord]):
    async with pair(groups) as both:
        both.shares[1].lost = True
        with pytest.raises(LedgerRegressed, match="rank 1: the step is not there"):
            await trained(both, chunk_at(0))
        both.shares[1].lost = False
        await both.worker.call(both.ranked.abandon_step)
        await trained(both, chunk_at(0))
    assert [call[0] if isinstance(call, tuple) else call for call in both.other.calls] == ["abandon_step", "accumulate"]


async def test_an_abandoned_fetch_is_forgotten_by_all(groups: list[Any], chunk_at: Callable[[int], ChunkRecord]):
    async with pair(groups) as both:
        both.shares[1].go.clear()
        fetching = asyncio.create_task(both.crew.fetch(chunk_at(0), lambda _edge: None))
        while not both.shares[1].asked:
            await asyncio.sleep(0)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await both.worker.call(both.ranked.abandon_step)
        both.shares[1].go.set()
        assert [one.seqs for one in await trained(both, chunk_at(1))] == [(0, 1, 2, 3, 4)]
        assert both.shares[1].asked == [0, 1]


async def test_the_end_of_a_rank_ends_a_fetch_that_waits_for_it(groups: list[Any], chunk_at: Callable[[int], ChunkRecord]):
    with pytest.raises(RankLost, match="rank 1 is gone"):  # noqa: PT012
        async with pair(groups) as both:
            both.shares[1].go.clear()
            fetching = asyncio.create_task(both.crew.fetch(chunk_at(0), lambda _edge: None))
            while not both.shares[1].asked:
                await asyncio.sleep(0)
            both.hub.lost(1, -9)
            await fetching


async def test_a_rank_that_never_answers_a_fetch_ends_rank_0(groups: list[Any], chunk_at: Callable[[int], ChunkRecord], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RankLost, match="rank 1 hangs: asked to fetch"):  # noqa: PT012
        async with pair(groups) as both:
            monkeypatch.setattr("consumer.ranks.leader._ANSWER_S", 0.5)
            both.shares[1].go.clear()
            await both.crew.fetch(chunk_at(0), lambda _edge: None)


async def test_a_backend_that_cannot_be_made_is_told(groups: list[Any]):
    def make() -> Backend:
        raise RollstreamError("model.path: no such folder")

    async with asyncio.timeout(100), Worker() as worker, Hub(2, "127.0.0.1") as hub:
        line = await knock(RankPlace(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=1), hub.port, hub.token)
        assert line is not None
        place = RankPlace(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=1)
        follower = Follower(place, line, worker, make=make, open_buffer=None, collate=collate)  # type: ignore[arg-type]
        with pytest.raises(ExceptionGroup):
            await follower.run()
        assert str(await hub.failure()) == "rank 1: model.path: no such folder"
        await line.close()


async def test_the_end_of_rank_0_is_seen_by_one_that_waits_for_commands(groups: list[Any]):
    async with pair(groups) as both:
        (line,) = both.hub._lines.values()
        line._writer.transport.abort()  # as the kernel does when its process is killed
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.shield(both.following)
    assert ended.group_contains(RankLost, match="rank 0 is gone")
    assert ended.value.exceptions[0].exit_code == EXIT_TRY_AGAIN


async def test_what_an_earlier_life_told_is_passed_over_until_rank_0_tells_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """One store for all lives, as torchrun's on the first host, which each host counts by itself."""
    from torch.distributed import HashStore  # type: ignore[attr-defined, unused-ignore]

    store, place = HashStore(), RankPlace(rank=1, ranks=2, local_rank=1, host="127.0.0.1", port=1)
    monkeypatch.setattr("consumer.ranks.follower._AGAIN_S", 0.01)
    async with asyncio.timeout(100), Hub(2, "127.0.0.1") as before, Hub(2, "127.0.0.1") as now:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        process_group.tell_channel(store, before.port, "of an earlier life")

        async def follow() -> str:
            async with line_to_rank_0(place, store) as (_, token):
                return token

        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        following = asyncio.create_task(follow())
        while not before._tasks:
            await asyncio.sleep(0)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
        process_group.tell_channel(store, now.port, now.token)
        assert await following == now.token
