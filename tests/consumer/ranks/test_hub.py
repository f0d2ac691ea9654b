"""The control channel over real sockets: commands, answers, and the ways that a rank goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvloop

from consumer.ranks import hub as hub_module
from consumer.ranks.channel import Answer, Call, Command, Hello, Kind, Line, RankFailed, RankLost
from consumer.ranks.hub import Hub
from protocol.codec import encode
from protocol.errors import EXIT_CONFIG, EXIT_TRY_AGAIN, LedgerRegressed
from protocol.messages import Edge


async def knock(hub: Hub, rank: int, token: str | None = None) -> Line:
    line = Line(*await asyncio.open_connection("127.0.0.1", hub.port))
    line.send(Hello(rank=rank, token=hub.token if token is None else token))
    return line


@contextlib.asynccontextmanager
async def three() -> AsyncIterator[tuple[Hub, Line, Line]]:
    """Rank 0's hub, and the ends of ranks 1 and 2."""
    async with asyncio.timeout(100), Hub(3, "127.0.0.1") as hub:
        lines = [await knock(hub, rank) for rank in (2, 1)]
        await hub.gather(60)
        for line in lines:
            assert (await line.receive(Command)).call is Call.WELCOME
        try:
            yield hub, lines[1], lines[0]
        finally:
            for line in lines:
                await line.close()


async def answer(line: Line, **fields: object) -> Command:
    command = await line.receive(Command)
    line.send(Answer(number=command.number, **fields))  # type: ignore[arg-type]
    return command


async def test_every_rank_hears_a_command_and_all_answers_come_back():
    async with three() as (hub, one, two):
        asked = asyncio.create_task(hub.ask(Call.FINISH, step=7, divisor=0.1))
        heard = await answer(two, kind=Kind.DONE, share=2, figures=({"tokens": 3},))
        assert (heard.call, heard.step, heard.divisor) == (Call.FINISH, 7, 0.1)
        await answer(one, kind=Kind.DONE, share=1)
        answers = await asked
        assert (answers[1].share, answers[2].share, answers[2].figures) == (1, 2, ({"tokens": 3},))


async def test_ranks_agree_on_the_lowest_and_the_highest_as_often_as_they_ask():
    async with three() as (hub, one, two), hub.talk(Call.FETCH, record=b"\0\xff") as talk:
        number = (await one.receive(Command)).number
        assert (await two.receive(Command)).record == b"\0\xff"
        for mine, others in ((1, (0, 2)), (2, (2, 2))):
            agreed = asyncio.create_task(talk.agree(mine))
            for line, value in zip((one, two), others, strict=True):
                line.send(Answer(number=number, kind=Kind.AGREE, revision=value))
            assert await agreed == (min(mine, *others), max(mine, *others))
            for line in (one, two):
                told = await line.receive(Command)
                assert (told.number, told.call, told.lowest, told.highest) == (number, Call.AGREED, min(mine, *others), max(mine, *others))


async def test_what_a_rank_waits_for_is_told():
    edges: list[Edge] = []
    async with three() as (hub, one, two), hub.talk(Call.FETCH, blocked=edges.append) as talk:
        number = (await two.receive(Command)).number
        two.send(Answer(number=number, kind=Kind.BLOCKED, edge=Edge.NO_GROUP.value))
        for line in (one, two):
            line.send(Answer(number=number, kind=Kind.DONE))
        await talk.done()
        assert edges == [Edge.NO_GROUP]


async def test_a_rank_s_error_reaches_rank_0_and_the_others_with_its_message_and_exit_code():
    async with three() as (hub, one, two):
        asked = asyncio.create_task(hub.ask(Call.COLLATE))
        await one.receive(Command)
        await two.receive(Command)
        two.send(Answer(number=0, kind=Kind.FAILED, words="model.path: no such folder", exit_code=EXIT_CONFIG))
        with pytest.raises(RankFailed, match=r"rank 2: model\.path: no such folder") as raised:
            await asked
        assert raised.value.exit_code == EXIT_CONFIG
        told = await one.receive(Command)
        assert (told.call, told.words) == (Call.END, "rank 2: model.path: no such folder")
        with pytest.raises(RankFailed):
            await hub.ask(Call.ACCUMULATE)
        assert str(await hub.failure()) == "rank 2: model.path: no such folder"


async def test_a_rank_that_is_gone_ends_whoever_waits_and_says_that_trying_again_is_right():
    async with three() as (hub, one, two):
        await two.close()
        failure = await hub.failure()
        assert (type(failure), failure.exit_code) == (RankLost, EXIT_TRY_AGAIN)
        assert str(failure) == "rank 2 is gone: the connection was closed"
        assert (await one.receive(Command)).call is Call.END


async def test_how_a_process_ended_says_more_than_its_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_module, "_HOW_S", 60.0)
    async with three() as (hub, _, two):
        await two.close()
        await asyncio.sleep(0)
        hub.lost(2, -9)
        assert str(await hub.failure()) == "rank 2 is gone: killed by SIGKILL"
    monkeypatch.setattr(hub_module, "_HOW_S", 1.0)
    async with three() as (hub, _, two):
        await two.close()
        hub.lost(2, EXIT_CONFIG)
        failure = await hub.failure()
        assert (str(failure), failure.exit_code) == ("rank 2: ended with exit code 2, see its log", EXIT_CONFIG)


async def test_a_fault_seen_in_a_collective_gives_way_to_that_of_the_rank_that_began_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_module, "_ROOT_S", 60.0)
    async with three() as (hub, one, two):
        one.send(Answer(number=0, kind=Kind.FAILED, words="RuntimeError: Connection closed by peer", echo=True))
        await one.flush(60)
        two.send(Answer(number=0, kind=Kind.FAILED, words="ValueError: odd"))
        assert str(await hub.failure()) == "rank 2: ValueError: odd"
    monkeypatch.setattr(hub_module, "_ROOT_S", 0.1)
    async with three() as (hub, one, _):
        one.send(Answer(number=0, kind=Kind.FAILED, words="RuntimeError: Connection closed by peer", echo=True))
        assert str(await hub.failure()) == "rank 1: RuntimeError: Connection closed by peer"


async def test_a_rank_that_hangs_with_its_connection_open_is_lost_and_one_that_waits_is_not():
    async with three() as (hub, one, two):
        with pytest.raises(RankLost, match="rank 1 hangs: asked to begin") as raised:
            await hub.ask(Call.BEGIN, silence_s=0.05)
        assert raised.value.exit_code == EXIT_TRY_AGAIN
        assert (await two.receive(Command)).call is Call.BEGIN
        assert (await two.receive(Command)).call is Call.END
    for said in ({"kind": Kind.AGREE, "revision": 1}, {"kind": Kind.BLOCKED, "edge": Edge.NO_GROUP.value}):
        async with three() as (hub, one, two), hub.talk(Call.FETCH, silence_s=1.0) as talk:
            asked_at = talk._heard[1]
            await answer(one, **said)
            while talk._heard[1] == asked_at:
                await asyncio.sleep(0.01)
            with pytest.raises(RankLost, match="rank 2 hangs: asked to fetch"):
                await talk.done()


async def test_a_rank_whose_value_was_taken_waits_for_the_others_and_is_not_the_one_that_hangs():
    async with three() as (hub, one, _), hub.talk(Call.FETCH) as talk:
        agreed = asyncio.create_task(talk.agree(1))
        await answer(one, kind=Kind.AGREE, revision=1)
        while 1 not in talk._agreeing or not talk._values[1].empty():
            await asyncio.sleep(0.01)
        now = asyncio.get_running_loop().time()
        talk._heard = {1: now - 100.0, 2: now - 50.0}
        assert await talk.silent(10.0) == 2
        agreed.cancel()


async def test_what_the_ledger_refused_a_rank_is_no_end_of_it():
    async with three() as (hub, one, two):
        asked = asyncio.create_task(hub.ask(Call.FETCH))
        await answer(one, kind=Kind.REFUSED, error="LedgerRegressed", words="step 3 is not there")
        await two.receive(Command)
        with pytest.raises(LedgerRegressed, match="rank 1: step 3 is not there"):
            await asked
        asked = asyncio.create_task(hub.ask(Call.ABANDON))
        await answer(one, kind=Kind.DONE)
        await answer(two, kind=Kind.DONE)
        assert set(await asked) == {1, 2}


async def test_a_stranger_is_turned_away_and_a_missing_rank_is_named(caplog: pytest.LogCaptureFixture):
    async with asyncio.timeout(100), Hub(3, "127.0.0.1") as hub:
        lines = [await knock(hub, 1)]
        await asyncio.sleep(0)
        lines += [await knock(hub, 2, token="guessed"), await knock(hub, 3)]
        raw = await asyncio.open_connection("127.0.0.1", hub.port)
        raw[1].write(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n")
        for line in lines[1:]:
            with pytest.raises(ConnectionError):
                await line.receive(Command)
        assert await raw[0].read() == b""
        with pytest.raises(RankLost, match=r"rank 2 did not come within 0 s"):
            await hub.gather(0.01)
        raw[1].close()
        for line in lines:
            await line.close()
    assert sum("turned away" in record.message for record in caplog.records) == 2


async def test_ranks_that_leave_when_told_are_no_failure():
    async with three() as (hub, one, two):
        stopping = asyncio.create_task(hub.stop(60))
        for line in (one, two):
            assert (await line.receive(Command)).call is Call.STOP
            await line.close()
        await stopping
        assert hub.failed_within(0) is None


async def test_the_end_of_rank_0_is_told_with_its_reason():
    with pytest.raises(ValueError, match="no room"):  # noqa: PT012
        async with three() as (hub, one, _):
            hub.end(ValueError("no room"))
            told = await one.receive(Command)
            assert (told.call, told.words) == (Call.END, "rank 0 ends: ValueError: no room")
            raise ValueError("no room")


async def test_who_waits_for_an_answer_when_rank_0_ends_waits_no_more_and_neither_does_who_asks_later():
    async with three() as (hub, one, two):
        asked = asyncio.create_task(hub.ask(Call.ACCUMULATE))
        await one.receive(Command)
        await two.receive(Command)
        hub.end(RuntimeError("another trainer has attached"))
        with pytest.raises(RankLost, match="rank 0 ends: RuntimeError: another trainer has attached"):
            await asked
        with pytest.raises(RankLost, match="rank 0 ends"):
            await hub.ask(Call.SNAPSHOT)


async def test_words_of_a_newer_release_are_a_rank_that_is_lost():
    async with three() as (hub, one, _):
        asked = asyncio.create_task(hub.ask(Call.ACCUMULATE))
        frame = bytearray(encode(Answer(number=1, kind=Kind.DONE)))
        assert frame.count(b"\xa6schema") == 1
        at = frame.index(b"\xa6schema") + len(b"\xa6schema")
        frame[at + 1] = 0x7F  # the major number
        one._writer.write(len(frame).to_bytes(4, "big") + frame)
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await asked


@pytest.mark.parametrize("host", ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])])
async def test_every_address_of_this_machine_reaches_the_one_port_that_is_told(host: str):
    async with asyncio.timeout(100), Hub(2, "") as hub:
        line = Line(*await asyncio.open_connection(host, hub.port))
        line.send(Hello(rank=1, token=hub.token))
        await hub.gather(60)
        await line.close()


def test_a_rank_whose_connection_was_reset_is_told_to_whoever_waits_and_to_the_other_ranks():
    """On uvloop, as the commands run: it raises where a transport that it has closed is written to."""

    async def one_resets() -> None:
        async with three() as (hub, one, two):
            asked = asyncio.create_task(hub.ask(Call.FINISH))
            await one.receive(Command)
            await two.receive(Command)
            one._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one._writer.transport.abort()
            with pytest.raises(RankLost, match="rank 1 is gone"):
                await asyncio.wait_for(asked, 60)
            assert (await two.receive(Command)).call is Call.END

    uvloop.run(one_resets())
