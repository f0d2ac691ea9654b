from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

from deploy.redis_server import server_command
from deploy.up import launcher as launcher_module
from deploy.up.process import ChildProcess, Identity, identity_of
from deploy.up.records import read_records
from deploy.up.supervisor import Child, Finish, Phase, Policy, Role
from protocol.connection import connect

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
STUB_UP = Path(__file__).with_name("stub_up.py")
EVERYONE = ["trainer-0", "engine-0", "engine-1", "producer-0"]
WAIT_S = 90.0


def _load_stub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stub_up", STUB_UP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stub_up"] = module
    spec.loader.exec_module(module)
    return module


stub = _load_stub()


class Journal:
    """What stub children say, in the order they say it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self._more = asyncio.Event()

    def take(self, text: str) -> None:
        self.said.append(text)
        self._more.set()

    async def until(self, *wanted: str) -> list[int]:
        """Wait until each of `wanted` (beginnings of lines) was said once more since the last call; the pids that said them."""
        pids = []
        async with asyncio.timeout(WAIT_S):
            for start in wanted:
                while (found := next((line for line in self.said if line.startswith(start)), None)) is None:
                    self._more.clear()
                    await self._more.wait()
                self.said.remove(found)
                pids.append(int(found.rpartition(" ")[2]))
        return pids


@pytest_asyncio.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    found = Journal(tmp_path / "journal")

    class Protocol(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, _addr: object) -> None:
            found.take(data.decode())

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Protocol, local_addr=str(found.path), family=1)  # type: ignore[arg-type]
    yield found
    transport.close()
    for record in read_records(tmp_path):  # a test that failed half-way must not leave anybody behind
        if (process := ChildProcess.adopt(record.identity)) is not None:
            process.kill()
            process.close()


def plan_of(folder: Path, journal: Journal, children: list[str], **behaviours: str) -> object:
    return stub.stub_plan(folder, journal.path, children, {name.replace("_", "-"): value for name, value in behaviours.items()})


@contextlib.asynccontextmanager
async def running(launcher: object, plan: object) -> AsyncIterator[asyncio.Task[Finish]]:
    task = asyncio.create_task(stub.run_up(launcher, plan), name="test:up")
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await launcher.abandon()  # type: ignore[attr-defined]


async def test_a_killed_child_is_started_again_and_found_in_the_records(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, EVERYONE)
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        trainer, engine, *_ = await journal.until("trainer-0 starts --new", "engine-0 starts", "engine-1 starts", "producer-0 starts")
        assert {os.getsid(trainer), os.getsid(engine)} == {trainer, engine}, "a Ctrl-C at the terminal must not reach the children"
        os.kill(engine, signal.SIGKILL)
        (again,) = await journal.until("engine-0 starts")
        assert again != engine
        records = {record.child: record for record in read_records(tmp_path)}
        assert records[Child(Role.ENGINE, 0)].identity == identity_of(again)
        assert {str(child) for child in records} == set(EVERYONE)
        launcher.request_stop()
        finish = await task
    assert finish == Finish(0)
    assert not any(identity_of(record.identity.pid) == record.identity for record in read_records(tmp_path))


async def test_more_are_started_and_fewer_leave_in_good_order_while_the_rest_goes_on(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, EVERYONE)
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        await journal.until(*(f"{name} starts" for name in EVERYONE))
        assert await launcher.scale(Role.PRODUCER, 3) == ""
        await journal.until("producer-1 starts", "producer-2 starts")
        assert launcher.wanted == {Role.PRODUCER: 3, Role.ENGINE: 2}
        assert {str(child) for child in launcher.processes(Role.PRODUCER)} == {"producer-0", "producer-1", "producer-2"}
        assert await launcher.scale(Role.ENGINE, 1) == ""
        assert await launcher.scale(Role.PRODUCER, 1) == ""
        await journal.until("engine-1 drains", "producer-1 drains", "producer-2 drains")
        assert await launcher.scale(Role.ENGINE, 20) == "there is no place for engine-9"
        assert await launcher.scale(Role.ENGINE, 2) == ""
        await journal.until("engine-1 starts")
        launcher.request_stop()
        assert await task == Finish(0)
    said = [line.rpartition(" ")[0] for line in journal.said]
    assert (said[:2], sorted(said[2:])) == (["trainer-0 drains", "producer-0 drains"], ["engine-0 drains", "engine-1 drains"])
    assert sorted(str(record.child) for record in read_records(tmp_path)) == sorted([*EVERYONE, "producer-1", "producer-2"])


async def test_who_was_added_and_cannot_run_ends_nothing(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "producer-0"], producer_1="refuses")
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        await journal.until("trainer-0 starts", "producer-0 starts")
        await launcher.scale(Role.PRODUCER, 2)
        async with asyncio.timeout(WAIT_S):
            while not launcher.lives[Child(Role.PRODUCER, 1)].why:
                await asyncio.sleep(0.01)
        assert "did you mean producer.count?" in launcher.lives[Child(Role.PRODUCER, 1)].why
        assert launcher.wanted[Role.PRODUCER] == 2
        await launcher.scale(Role.PRODUCER, 1)
        async with asyncio.timeout(WAIT_S):
            while launcher.lives[Child(Role.PRODUCER, 1)].wanted:
                await asyncio.sleep(0.01)
        assert set(launcher.processes(Role.PRODUCER)) == {Child(Role.PRODUCER, 0)}, "one was given up, and one is wanted: nobody else leaves"
        launcher.request_stop()
        assert await task == Finish(0)


async def test_a_killed_trainer_comes_back_with_resume_once_the_run_is_there(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0"])
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        (trainer,) = await journal.until("trainer-0 starts --new")
        os.kill(trainer, signal.SIGKILL)
        (trainer,) = await journal.until("trainer-0 starts --new")
        (tmp_path / "exists").touch()
        os.kill(trainer, signal.SIGKILL)
        await journal.until("trainer-0 starts --resume")
        launcher.request_stop()
        assert (await task).code == 0


async def test_stop_goes_from_the_trainer_to_the_engines(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, EVERYONE)
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        await journal.until(*(f"{name} starts" for name in EVERYONE))
        assert not launcher.cut_short
        launcher.request_stop()
        assert (await task).code == 0
        assert launcher.cut_short
    roles = [line.split("-")[0] for line in journal.said]
    assert roles == ["trainer", "producer", "engine", "engine"]
    assert (tmp_path / "settled").exists()


async def test_producers_that_leave_a_draining_run_come_back_only_if_it_goes_on(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "producer-0"])
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        _, producer = await journal.until("trainer-0 starts", "producer-0 starts")
        (tmp_path / "drained").touch()
        os.kill(producer, signal.SIGTERM)
        await journal.until("producer-0 drains")
        held = launcher.lives[Child(Role.PRODUCER)]
        async with asyncio.timeout(WAIT_S):
            while held.phase is not Phase.WAITING:
                await asyncio.sleep(0)
        assert held.restarts == 0
        assert [text for _, text in launcher.notes if "ended" in text] == ["producer-0 ended (exit 0)"]
        (tmp_path / "drained").unlink()
        await journal.until("producer-0 starts")
        launcher.request_stop()
        assert (await task).code == 0


async def test_exit_2_ends_the_run_with_the_childs_own_words(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, EVERYONE, producer_0="refuses")
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        finish = await task
    assert finish.code == 2
    assert "did you mean producer.count?" in finish.message
    assert "producer-0.log" in finish.message


async def test_a_replaced_trainer_is_not_started_again_and_nothing_is_settled(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, EVERYONE, trainer_0="replaced")
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        finish = await task
    assert finish.code == 1
    assert "trainer-0 was replaced" in finish.message
    assert "must stop" in finish.message
    assert launcher.lives[Child(Role.TRAINER)].restarts == 0
    assert not (tmp_path / "settled").exists()


async def test_figures_and_records_that_cannot_be_written_end_nothing_and_start_nobody_twice(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_arguments: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher_module, "measure", full)
    monkeypatch.setattr(launcher_module, "write_records", full)
    monkeypatch.setattr(launcher_module.Resources, "write", full)
    plan = plan_of(tmp_path, journal, ["trainer-0", "engine-0"])
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        await journal.until("trainer-0 starts", "engine-0 starts")
        launcher.request_stop()
        assert await task == Finish(0)
    assert not [line for line in journal.said if "starts" in line]
    assert "processes.json was not written" in caplog.text


def test_a_process_that_cannot_be_watched_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    def popen(*arguments: object, **named: object) -> subprocess.Popen[bytes]:
        started.append(subprocess_popen(*arguments, **named))  # type: ignore[call-overload]
        return started[-1]

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(os, "pidfd_open", none_left)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="Too many"):
        ChildProcess.start(["sleep", "100"], log=tmp_path / "log")
    assert started[0].returncode == -signal.SIGKILL


async def test_asked_twice_it_does_not_wait_for_the_summary(tmp_path: Path, journal: Journal):
    settling = asyncio.Event()

    async def settle() -> None:
        settling.set()
        await asyncio.Event().wait()

    plan = plan_of(tmp_path, journal, ["trainer-0"])
    launcher = stub.make_launcher(tmp_path, plan, settle=settle)
    async with running(launcher, plan) as task:
        await journal.until("trainer-0 starts")
        launcher.request_stop()
        await asyncio.wait_for(settling.wait(), WAIT_S)
        launcher.request_stop()
        finish = await asyncio.wait_for(task, WAIT_S)
    assert finish == Finish(1, "ended by force")


async def test_who_waits_for_redis_to_start_keeps_nobody_from_stopping(tmp_path: Path, journal: Journal):
    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    plan = plan_of(tmp_path, journal, EVERYONE)
    launcher = stub.make_launcher(tmp_path, plan, redis_answers=never)
    async with running(launcher, plan) as task:
        await asyncio.wait_for(asked.wait(), WAIT_S)
        launcher.request_stop()
        finish = await asyncio.wait_for(task, WAIT_S)
    assert "trainer-0 did not drain" in finish.message
    assert not journal.said


async def test_a_child_that_ignores_the_wish_to_stop_is_killed_and_the_exit_code_is_1(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "engine-0"], engine_0="stubborn")
    policy = Policy(stop_s=dict.fromkeys(Role, 90.0) | {Role.ENGINE: 0.3}, alone_s={})
    launcher = stub.make_launcher(tmp_path, plan, policy=policy)
    async with running(launcher, plan) as task:
        await journal.until("trainer-0 starts", "engine-0 starts")
        launcher.request_stop()
        finish = await task
    assert finish.code == 1
    assert "engine-0 did not stop" in finish.message


async def test_what_the_kernel_does_not_let_go_is_left_behind_and_the_end_comes(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch):
    """A driver that hangs cannot be staged: here the kill does not arrive."""
    plan = plan_of(tmp_path, journal, ["trainer-0", "engine-0"], engine_0="stubborn")
    launcher = stub.make_launcher(tmp_path, plan, policy=Policy(stop_s=dict.fromkeys(Role, 90.0) | {Role.ENGINE: 0.3}, alone_s={}, reap_s=0.2))
    async with running(launcher, plan) as task:
        _, engine = await journal.until("trainer-0 starts", "engine-0 starts")
        with monkeypatch.context() as patch:
            patch.setattr(ChildProcess, "kill", lambda _: None)
            launcher.request_stop()
            finish = await asyncio.wait_for(task, WAIT_S)
    os.kill(engine, signal.SIGKILL)
    launcher._processes[Child(Role.ENGINE)]._popen.wait()
    assert finish.code == 1
    assert "engine-0 did not stop" in finish.message
    assert launcher.lives[Child(Role.ENGINE)].why == "engine-0 was killed and has not ended within 0 s: the kernel holds it"


async def test_asked_twice_it_ends_everyone_at_once(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "engine-0"], trainer_0="stubborn")
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        await journal.until("trainer-0 starts", "engine-0 starts")
        launcher.request_stop()
        await journal.until("trainer-0 ignores")
        launcher.request_stop()
        finish = await task
    assert finish == Finish(1, "ended by force")
    assert not any(identity_of(record.identity.pid) == record.identity for record in read_records(tmp_path))


async def test_what_a_dead_child_had_started_dies_with_it(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "producer-0"], producer_0="parent")
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        (producer,) = await journal.until("producer-0 has")
        grandchild = _grandchild(producer)
        ended = ChildProcess.adopt(grandchild)
        assert ended is not None
        os.kill(producer, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        launcher.request_stop()
        await task


def _grandchild(pid: int) -> Identity:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = identity_of(int(child))
    assert found is not None
    return found


async def test_resources_sum_over_a_restart(tmp_path: Path, journal: Journal):
    plan = plan_of(tmp_path, journal, ["trainer-0", "engine-0"])
    launcher = stub.make_launcher(tmp_path, plan)
    async with running(launcher, plan) as task:
        (_, engine) = await journal.until("trainer-0 starts", "engine-0 starts")
        os.kill(engine, signal.SIGKILL)
        await journal.until("engine-0 starts")
        launcher.request_stop()
        await task
    report = json.loads((tmp_path / "resources.json").read_bytes())
    assert report["restarts"] == {"engine": 1}
    assert set(report["cpu_seconds"]) >= {"engine", "trainer", "up"}
    assert report["live"] == {}


async def spawn_up(tmp_path: Path, journal: Journal, children: list[str], *, settings: str = "same", **behaviours: str) -> asyncio.subprocess.Process:
    described = {"children": children, "behaviours": {name.replace("_", "-"): value for name, value in behaviours.items()}, "settings": settings}
    (tmp_path / "plan.json").write_text(json.dumps(described))
    return await asyncio.create_subprocess_exec(
        sys.executable, str(STUB_UP), str(tmp_path), str(journal.path), str(tmp_path / "plan.json"), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


async def test_a_killed_up_leaves_its_children_and_the_next_one_goes_on_with_them(tmp_path: Path, journal: Journal):
    first = await spawn_up(tmp_path, journal, ["redis-0", *EVERYONE])
    before = await journal.until(*(f"{name} starts" for name in EVERYONE))
    client = connect(server_command(tmp_path / "redis").url, deadline_s=60.0)
    await client.set("kept", "1")
    redis_pid = (await client.info("server"))["process_id"]
    first.kill()
    await first.wait()
    assert all(identity_of(pid) is not None for pid in before)
    second = await spawn_up(tmp_path, journal, ["redis-0", *EVERYONE])
    os.kill(before[3], signal.SIGKILL)  # an adopted child is watched like any other
    (producer,) = await journal.until("producer-0 starts")
    records = {str(record.child): record.identity.pid for record in read_records(tmp_path)}
    assert [records[name] for name in EVERYONE] == [*before[:3], producer]
    assert records["redis-0"] == redis_pid
    assert await client.get("kept") == b"1"
    await client.aclose()
    second.send_signal(signal.SIGTERM)
    assert await second.wait() == 0
    assert "trainer-0 starts --resume" not in " ".join(journal.said)


async def test_a_child_of_other_settings_or_of_no_use_is_ended_by_the_next_up(tmp_path: Path, journal: Journal):
    first = await spawn_up(tmp_path, journal, EVERYONE)
    await journal.until(*(f"{name} starts" for name in EVERYONE))
    first.kill()
    await first.wait()
    second = await spawn_up(tmp_path, journal, ["trainer-0", "engine-0"], settings="other")
    await journal.until("trainer-0 drains", "engine-0 drains", "engine-1 drains", "producer-0 drains")
    await journal.until("trainer-0 starts", "engine-0 starts")
    second.send_signal(signal.SIGTERM)
    assert await second.wait() == 0


async def test_a_killed_redis_comes_back_with_its_data(tmp_path: Path, journal: Journal):
    up = await spawn_up(tmp_path, journal, ["redis-0", "trainer-0"])
    await journal.until("trainer-0 starts")
    client = connect(server_command(tmp_path / "redis").url, deadline_s=60.0)
    await client.set("kept", "1")
    before = (await client.info("server"))["process_id"]
    os.kill(before, signal.SIGKILL)
    assert await client.get("kept") == b"1"
    assert (await client.info("server"))["process_id"] != before
    await client.aclose()
    up.send_signal(signal.SIGTERM)
    assert await up.wait() == 0


def test_a_pid_that_belongs_to_another_process_is_never_adopted():
    process = subprocess.Popen(["sleep", "100"])
    try:
        found = identity_of(process.pid)
        assert found is not None
        impostor = type(found)(pid=found.pid, started=found.started + "0")
        assert ChildProcess.adopt(impostor) is None
        adopted = ChildProcess.adopt(found)
        assert adopted is not None
        adopted.close()
    finally:
        process.kill()
        process.wait()
    assert identity_of(process.pid) is None
