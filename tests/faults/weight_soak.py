"""Weight rounds by seed, on a new stand every few rounds: see `weight_rounds`."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from tests.faults.nursery import nursery
from tests.faults.weight_rounds import random_plan, run_round
from tests.faults.weight_stand import PRELOADED, Stand, StandFailed
from tests.producer.engine.conftest import write_model

_ON_A_STAND = 10
_PAUSE_MODES = ("in_place", "retract", "abort")


async def soak_weights(rounds: int, seed: int) -> list[int]:
    """The seeds of stands that failed; a failure ends its stand."""
    stands = range(-(-rounds // _ON_A_STAND))
    with tempfile.TemporaryDirectory(prefix="rs-nest-") as nest, nursery(Path(nest), PRELOADED) as path:
        return [seed + i for i in stands if not await _stand(path, min(_ON_A_STAND, rounds - i * _ON_A_STAND), seed + i)]


async def _stand(nest: Path, rounds: int, seed: int) -> bool:
    rng = random.Random(seed)
    transport, engines, pause_mode = ("gloo", "delta")[seed % 2], rng.choice((2, 3)), rng.choice(_PAUSE_MODES)
    named = f"stand {seed} ({transport}, {engines} engines, {pause_mode})"
    with tempfile.TemporaryDirectory(prefix="rs-soak-") as folder:
        model = write_model(Path(folder) / "model", seed=seed)
        try:
            async with Stand(Path(folder) / "stand", model, transport, nest, engines=engines, changes={"weights": {"pause_mode": pause_mode}}) as stand:
                for _ in range(rounds):
                    began, plan = time.monotonic(), random_plan(rng, transport, engines)
                    compared = await run_round(stand, plan)
                    print(f"{named}: {plan}, {compared} looks, {time.monotonic() - began:.1f} s", flush=True)
        except StandFailed as problem:
            print(f"{named} FAILED; again: python -m tests.faults.soak --rounds 0 --weight-rounds {rounds} --seed {seed}\n{problem}", flush=True)
            return False
    return True
