"""New weights through a process group, sent by the code of the project's own weight server; and from memory that a sender shares."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from protocol.errors import ApplyFailed
from protocol.versions import Version
from weightsync.buckets import Bucket, plan
from weightsync.safetensors_file import open_tensors
from weightsync.server.process_group import Group
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

from .conftest import Models
from .engine import PROMPT, SOON, Engine, Reply, asking
from .spans import check_in_place, check_recomputed, logged, split

DEADLINE_S = 120.0
BUCKET = 200_000
"""Bytes: the model takes three."""


@pytest.fixture(scope="session", autouse=True)
def first_store() -> None:
    """The first store that listens in a process opens a pipe that torch keeps."""
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Sent:
    """Model `b` in buckets, as the weight server cuts them."""

    def __init__(self, models: Models, folder: Path) -> None:
        with open_tensors(models.b / "model.safetensors") as tensors:
            manifest = DirectoryStore(folder, models.a).write(Snapshot(version=Version(1, 1), tensors=tensors))
        self.tensors = load_file(models.b / "model.safetensors")
        self.buckets = plan(manifest, BUCKET)

    def flat(self, bucket: Bucket) -> torch.Tensor:
        return torch.cat([self.tensors[name].flatten().view(torch.uint8) for name in bucket.names])


@pytest.fixture
def sent(models: Models, tmp_path: Path) -> Sent:
    return Sent(models, tmp_path)


@contextlib.asynccontextmanager
async def group_with(engine: Engine) -> AsyncIterator[Group]:
    """A group of the engine and this process, which both leave in the end."""
    group = Group(backend="gloo", device=torch.device("cpu"), address="127.0.0.1", world_size=2, timeout_s=DEADLINE_S)
    asked = engine.control.init_group(
        master_address="127.0.0.1", master_port=group.port, rank_offset=1, world_size=2, group_name=group.name, backend="gloo", deadline_s=DEADLINE_S
    )
    try:
        await asyncio.gather(asked, asyncio.to_thread(group.join))
        yield group
    finally:
        await engine.control.destroy_group(group.name)
        await asyncio.to_thread(group.destroy)


async def bring(engine: Engine, group: Group, sent: Sent, version: str) -> None:
    """As the project's transport does: flattened, the version with the last bucket."""
    for bucket in sent.buckets:
        named = version if bucket is sent.buckets[-1] else None
        await asyncio.gather(
            engine.control.update_from_distributed(bucket, group=group.name, version=named, deadline_s=DEADLINE_S), send(group, [sent.flat(bucket)])
        )


async def send(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    await asyncio.to_thread(lambda: group.send(tensors, deadline_s=DEADLINE_S))


async def serves_b(engine: Engine, models: Models, version: str, tolerance: float) -> None:
    answer = await engine.generate(asking(12, extra_key=f"check {version}"))
    torch.testing.assert_close(logged(answer), models.written(models.b, PROMPT, answer["output_ids"]), atol=tolerance, rtol=0)
    assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 12}]
    assert await engine.version() == version


async def test_buckets_of_bytes_are_served_under_the_version_of_the_last(engine: Engine, models: Models, tolerance: float, sent: Sent):
    assert len(sent.buckets) > 1
    async with group_with(engine) as group:
        await engine.control.begin_session()
        await bring(engine, group, sent, "1:1")
        await engine.control.end_session()
        await serves_b(engine, models, "1:1", tolerance)
    by_group = await engine.checksum()
    await engine.control.update_from_disk(str(models.b), "1:2", deadline_s=DEADLINE_S)
    assert await engine.checksum() == by_group


async def test_one_broadcast_a_tensor_does_as_well(engine: Engine, models: Models, tolerance: float, sent: Sent):
    async with group_with(engine) as group:
        await engine.post("/begin_weight_update")
        body = {
            "names": list(sent.tensors),
            "dtypes": ["float32"] * len(sent.tensors),
            "shapes": [list(tensor.shape) for tensor in sent.tensors.values()],
            "group_name": group.name,
            "flush_cache": True,
            "weight_version": "1:1",
        }
        reply, _ = await asyncio.gather(engine.post("/update_weights_from_distributed", body), send(group, list(sent.tensors.values())))
        assert reply == (200, {"success": True, "message": "Succeeded to update parameter online. Weight version updated to 1:1."})
        assert (await engine.post("/end_weight_update")).status == 200
    await serves_b(engine, models, "1:1", tolerance)


async def test_in_place_a_running_request_goes_on_in_a_span_of_the_new_version(engine: Engine, models: Models, tolerance: float, sent: Sent):
    async with group_with(engine) as group, engine.running(1, tokens=SOON) as (one,):
        await engine.control.pause("in_place")
        await engine.control.begin_session()
        await bring(engine, group, sent, "1:1")
        await engine.control.end_session()
        await engine.control.resume()
        answer = await one.answer()
    check_in_place(answer, split(answer, "1:0", "1:1"), models, PROMPT, lag=await engine.span_lag(), tolerance=tolerance)


async def test_a_retracted_request_is_read_anew(engine: Engine, models: Models, tolerance: float, sent: Sent):
    async with group_with(engine) as group, engine.running(1, tokens=SOON) as (one,):
        await engine.control.pause("retract")
        await engine.control.begin_session()
        await bring(engine, group, sent, "1:1")
        await engine.control.end_session()
        assert await engine.control.flush_cache()
        await engine.control.resume()
        answer = await one.answer()
    check_recomputed(answer, split(answer, "1:0", "1:1"), models, PROMPT, tolerance=tolerance)


async def test_a_group_that_is_left_can_be_followed_by_another(engine: Engine, models: Models, tolerance: float, sent: Sent):
    for version in ("1:1", "1:2"):
        async with group_with(engine) as group:
            await engine.control.begin_session()
            await bring(engine, group, sent, version)
            await engine.control.end_session()
    await serves_b(engine, models, "1:2", tolerance)
    gone = {"success": False, "message": "The group to be destroyed does not exist."}
    assert await engine.post("/destroy_weights_update_group", {"group_name": group.name}) == (400, gone)


async def test_a_bucket_for_a_group_that_is_not_there_is_refused(engine: Engine, sent: Sent):
    await engine.control.begin_session()
    with pytest.raises(ApplyFailed, match="Please call `init_weights_update_group` first"):
        await engine.control.update_from_distributed(sent.buckets[0], group="nobody", version=None, deadline_s=DEADLINE_S)
    assert await engine.version() == "1:0"


@contextlib.asynccontextmanager
async def shared(folder: Path) -> AsyncIterator[str]:
    """The payload of a process that shares the tensors of `folder`, while it does."""
    program = str(Path(__file__).with_name("sharing.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    assert process.stdin
    assert process.stdout
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        await process.communicate(b"\n")


async def tensors(engine: Engine, payload: str, **options: Any) -> Reply:
    body = {"serialized_named_tensors": [payload], "flush_cache": False, "weight_version": "1:1"} | options
    return await engine.post("/update_weights_from_tensor", body)


async def test_tensors_in_shared_memory_are_taken_within_a_session_where_the_engine_knows_the_call(engine: Engine, models: Models, tolerance: float):
    """The embedded engine does not: their form is pickle, which it does not read."""
    status, answer = await tensors(engine, "AA==")
    if status == 404:
        with pytest.raises(ApplyFailed, match="404"):
            await engine.control.update_from_tensor(["AA=="], load_format=None, version="1:1", deadline_s=DEADLINE_S)
        return
    refused = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
    assert (status, answer) == (400, {"success": False, "message": refused})
    async with shared(models.b) as payload:
        await engine.control.begin_session()
        await engine.control.update_from_tensor([payload], load_format=None, version="1:1", deadline_s=DEADLINE_S)
        await engine.control.end_session()
        await serves_b(engine, models, "1:1", tolerance)
