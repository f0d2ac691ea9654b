"""kill -9 of engine hosts, weight server, relay and trainer in the middle of each phase of an update: see `weight_rounds`."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.wakeups import Topic
from tests.faults.weight_rounds import CI_PLANS, ENGINE_POINTS, RELAY_POINTS, SERVER_POINTS, VERSION_POINTS, run_round
from tests.faults.weight_stand import TRAINER, Stand
from tests.faults.weight_verdict import Watch, unfit_problems
from tests.producer.engine.conftest import write_model
from weightsync.control import EngineControl

pytestmark = [pytest.mark.redis, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("transport", CI_PLANS)
async def test_whoever_dies_in_an_update_no_engine_serves_what_it_does_not_have(transport: str, tmp_path: Path, weight_nest: Path):
    model = write_model(tmp_path / "model", seed=1)
    async with Stand(tmp_path / "stand", model, transport, weight_nest, engines=3) as stand:
        for plan in CI_PLANS[transport]:
            assert await run_round(stand, plan) >= stand.engines


def test_there_is_a_round_for_every_phase_of_an_update():
    gloo, delta = ({plan.at for plan in CI_PLANS[transport]} for transport in ("gloo", "delta"))
    assert gloo == {*ENGINE_POINTS, *SERVER_POINTS}
    assert delta == {*ENGINE_POINTS, *RELAY_POINTS, *VERSION_POINTS}


async def test_the_verdict_sees_other_bytes_an_older_version_and_a_lost_route(tmp_path: Path, weight_nest: Path):
    async with Stand(tmp_path / "stand", write_model(tmp_path / "model", seed=1), "store", weight_nest, engines=2) as stand:
        while (await stand.newest()).n < 2:  # 1:0 has the bytes of the model itself
            await stand.waker.wait(Topic.WEIGHTS, since=stand.waker.mark(Topic.WEIGHTS), timeout_s=0.2)
        await stand.kill(TRAINER)
        version = await stand.converge()
        one, other = await stand.registry.engines()
        lying, older = EngineControl(stand.session, one.url), EngineControl(stand.session, other.url)
        await lying.update_from_disk(str(stand.model), str(version), deadline_s=60.0)
        await older.update_from_disk(str(stand.model), "1:0", deadline_s=60.0)
        watch = Watch(stand)
        assert not await watch.look(one)
        assert f"{one.engine_id} serves {version} with other bytes" in watch.problems[0]
        await watch.look(other)
        assert f"{other.engine_id} is routed as {version}, and answers under 1:0" in watch.problems[1:]
        await stand.registry.mark_unfit(other.engine_id, other.boot_nonce, "somebody said so")
        events = await stand.events()
        assert "lost its route: unfit somebody said so" in unfit_problems(stand, events, "engine-0", 2)[0]
        assert unfit_problems(stand, events, "engine-1", 2) == []
