from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.contract import Granted
from buffer.redis_ledger import RedisLedger
from deploy import letters
from deploy.cli import main
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Reason
from protocol.versions import Version

pytestmark = pytest.mark.redis
Command = Callable[..., Awaitable[tuple[int, str]]]


@pytest_asyncio.fixture
async def ledger(redis: Client, keys: Keys) -> RedisLedger:
    """A run whose groups 0 to 3 are dead: of an engine, of nothing that was told, of an engine, and by a filter."""
    ledger = RedisLedger(redis, keys, cluster=False)
    settings = BufferConfig(groups_per_step=4, chunk_groups=4, byte_budget=10_000, max_attempts=1)
    await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="rows", tokenizer="words"), settings)
    await ledger.attach(None, trainer_id="trainer")
    granted = await ledger.reserve("owner", "request", 4, max_bytes=100, served=Version(1, 0))
    assert isinstance(granted, Granted)
    await ledger.bind(granted.slots[0].seq, granted.slots[0].token, "row-17")
    for slot, reason, why in zip(granted.slots, ("failed", "failed", "failed", "filtered"), ("engine\nsaid no", "", "x" * 300, "all alike"), strict=True):
        await ledger.release(slot.seq, slot.token, Reason(reason), why=why)
    return ledger


@pytest.fixture
def command(redis_url: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`rollstream letters …`: exit code, and what it said."""
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{keys.run}"\ndir = "{tmp_path}/run"\n[redis]\nurl = "{redis_url}"\n')

    async def run(*words: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["letters", *words, "-c", str(path)])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


async def test_letters_are_listed_in_lines_and_shown_in_full(ledger: RedisLedger, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "_PAGE", 2)
    assert (await ledger.status()).letters == 3
    code, text = await command("list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["group", "0", "1", "2"]
    assert "engine said no" in text
    assert "row-17" in text
    assert "x" * 100 not in text
    found = json.loads((await command("list", "--json"))[1])
    assert [(one["seq"], one["reason"], one["failures"], one["prompt_id"]) for one in found] == [
        (0, "failed", 1, "row-17"),
        (1, "failed", 1, None),
        (2, "failed", 1, None),
    ]
    assert json.loads((await command("list", "--json", "--reason", "stale"))[1]) == []
    assert "no dead letters" in (await command("list", "--reason", "stale"))[1]
    code, text = await command("show", "2", "0")
    assert code == 0
    assert "x" * 300 in text
    assert "engine\nsaid no" in text
    assert text.index("x" * 300) < text.index("row-17")
    assert json.loads((await command("show", "1", "--json"))[1])[0]["why"] == ""


async def test_letters_are_queued_again_by_name_by_reason_or_all(ledger: RedisLedger, command: Command) -> None:
    assert await command("requeue", "1") == (0, "1 groups will be handed out again\n")
    status = await ledger.status()
    assert (status.letters, status.released, status.dead) == (2, 1, {Reason.FAILED: 2, Reason.FILTERED: 1})
    assert json.loads((await command("requeue", "--reason", "stale", "--json"))[1]) == {"requeued": []}
    assert json.loads((await command("requeue", "--all", "--json"))[1]) == {"requeued": [0, 2]}
    granted = await ledger.reserve("owner", "again", 3, max_bytes=100, served=Version(1, 0))
    assert isinstance(granted, Granted)
    assert [(slot.seq, slot.attempt) for slot in granted.slots] == [(0, 2), (1, 2), (2, 2)]


async def test_a_group_without_a_letter_and_an_unclear_wish_change_nothing(ledger: RedisLedger, command: Command) -> None:
    for words, told in (
        (("requeue", "0", "3"), "no dead letter of group 3"),
        (("show", "7"), "no dead letter of group 7"),
        (("requeue",), "--all"),
        (("requeue", "0", "--all"), "not both"),
        (("requeue", "0", "--reason", "failed"), "not both"),
    ):
        code, text = await command(*words)
        assert code == 2
        assert told in text
    assert (await ledger.status()).letters == 3


async def test_letters_of_a_run_that_is_not_there(command: Command) -> None:
    code, text = await command("list")
    assert code == 2
    assert "does not exist" in text
