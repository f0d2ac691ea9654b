"""The torch backend, held back until everything that may be outstanding has been written: what a run trains on is then exactly D steps old.

With D = K = s a group is admitted only to an engine of the newest version (rule S3), behind exactly s steps of others, and here no step ends before that group
is READY: none of its tokens sees a newer version, and it is trained s steps later. Left to themselves, engines slower than the trainer write fresher tokens.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from buffer.contract import RunState
from buffer.redis_ledger import RedisLedger
from consumer.backend import StepReport
from consumer.config import TrainerConfig
from consumer.losses.config import LossConfig
from consumer.torch_backend import TorchBackend
from protocol.connection import connect
from protocol.errors import RollstreamError
from protocol.keys import Keys

URL, RUN = "ROLLSTREAM_LEARNING_REDIS", "ROLLSTREAM_LEARNING_RUN"
"""Environment variables with the Redis and the name of the run; a backend is given neither."""
_LOOK_S = 0.004
_WAIT_S = 120.0


class Lockstep(TorchBackend):
    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int) -> None:
        super().__init__(model_path, config, loss=loss, temperature=temperature, seed=seed)
        self._runner = asyncio.Runner()  # of the one thread that calls a backend
        self._ledger: RedisLedger | None = None

    def finish_step(self, step: int, divisor: float) -> StepReport:
        self._runner.run(self._all_written(step))
        return super().finish_step(step, divisor)

    async def _all_written(self, step: int) -> None:
        """Return once nothing that is admitted is still to be generated, or the run ends. Raises: `RollstreamError`."""
        if self._ledger is None:
            self._ledger = RedisLedger(connect(os.environ[URL], deadline_s=30.0), Keys(os.environ[RUN]))
        until = time.monotonic() + _WAIT_S
        while True:
            status = await self._ledger.status()
            if status.ready + status.leased >= status.admission_limit or status.state is not RunState.OPEN:
                return
            if time.monotonic() > until:
                raise RollstreamError(
                    f"step {step}: after {_WAIT_S:.0f} s {status.ready} groups are ready and {status.leased} leased of {status.admission_limit}: see the "
                    "logs of producer and engine"
                )
            await asyncio.sleep(_LOOK_S)
