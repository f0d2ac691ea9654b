"""An `up` whose children are stubs: `stub_up.py FOLDER JOURNAL PLAN.json`. Exit code as the run's."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.redis_server import server_command, wait_ready
from deploy.up.launcher import Hooks, Launcher
from deploy.up.supervisor import Child, Finish, Policy, Role
from protocol.errors import EXIT_DRAINED

HERE = Path(__file__).parent


@dataclass(frozen=True)
class StubPlan:
    folder: Path
    journal: Path
    behaviours: Mapping[str, str]
    children: tuple[Child, ...]
    reserved: frozenset[Child] = frozenset()

    def refuses(self, child: Child) -> str:
        return f"there is no place for {child}" if child.index > 8 else ""

    def argv(self, child: Child) -> tuple[str, ...]:
        if child.role is Role.REDIS:
            return server_command(self.folder / "redis").argv
        return (sys.executable, "-S", str(HERE / "stub_child.py"), str(self.journal), str(child), self.behaviours.get(str(child), "serves"))

    def environment(self, _child: Child) -> None:
        return None


def stub_plan(folder: Path, journal: Path, children: list[str], behaviours: Mapping[str, str]) -> StubPlan:
    parsed = tuple(Child(Role(name.rpartition("-")[0]), int(name.rpartition("-")[2])) for name in children)
    return StubPlan(folder=folder, journal=journal, behaviours=behaviours, children=parsed)


def make_launcher(
    folder: Path,
    plan: StubPlan,
    *,
    settings: str = "same",
    policy: Policy | None = None,
    settle: Callable[[], Awaitable[None]] | None = None,
    redis_answers: Callable[[], Awaitable[None]] | None = None,
) -> Launcher:
    async def answers() -> None:
        return None

    async def trainer_flag() -> str:
        return "--resume" if (folder / "exists").exists() else "--new"

    async def drained() -> bool:
        return (folder / "drained").exists()

    async def note() -> None:
        (folder / "settled").touch()

    hooks = Hooks(redis_answers=redis_answers or answers, trainer_flag=trainer_flag, drained=drained, settle=settle or note)
    quick = policy or Policy(backoff_s=0.01, backoff_cap_s=0.05, idle_s=0.05)
    return Launcher(folder, plan, settings=settings, hooks=hooks, policy=quick)


async def run_up(launcher: Launcher, plan: StubPlan) -> Finish:
    found = launcher.take_over()
    if any(child.role is Role.REDIS for child in plan.children):
        (plan.folder / "redis").mkdir(exist_ok=True)
        url = server_command(plan.folder / "redis").url
        await launcher.begin_redis(lambda deadline_s: wait_ready(url, timeout_s=deadline_s))
    await launcher.adopt(found)
    return await launcher.run()


async def main() -> int:
    folder, journal = Path(sys.argv[1]), Path(sys.argv[2])
    described = json.loads(Path(sys.argv[3]).read_text())
    plan = stub_plan(folder, journal, described["children"], described["behaviours"])
    launcher = make_launcher(folder, plan, settings=described.get("settings", "same"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, launcher.request_stop)
    finish = await run_up(launcher, plan)
    sys.stderr.write(finish.message)
    return finish.code


if __name__ == "__main__":
    code = asyncio.run(main())
    assert code >= EXIT_DRAINED
    sys.exit(code)
