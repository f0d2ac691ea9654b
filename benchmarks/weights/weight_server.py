"""`python -m benchmarks.weights.weight_server JSON`: a weight server with that configuration, until its stdin ends."""

from __future__ import annotations

import asyncio
import logging
import sys

import orjson

from benchmarks.weights.child import Answer, answer_commands
from weightsync.server.serve import WeightServerConfig, run_weight_server


async def _nothing(_: dict[str, object]) -> Answer:
    return {}


async def main() -> None:
    logging.basicConfig(level=logging.INFO)
    stop = asyncio.Event()
    config = WeightServerConfig.model_validate(orjson.loads(sys.argv[1]))
    async with asyncio.TaskGroup() as group:
        group.create_task(run_weight_server(config, stop))
        await answer_commands(_nothing)
        stop.set()


if __name__ == "__main__":
    asyncio.run(main())
