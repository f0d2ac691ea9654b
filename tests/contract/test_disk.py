"""New weights from a folder: into running requests, between them, and when they cannot be had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ApplyFailed
from protocol.versions import Version
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

from .conftest import Models
from .engine import PROMPT, SOON, Engine, asking
from .spans import check_in_place, check_recomputed, logged, split


def update(path: Path, version: str | None = "1:1", **options: Any) -> dict[str, Any]:
    return {"model_path": str(path), "weight_version": version} | options


async def serves(engine: Engine, models: Models, path: Path, version: str, tolerance: float) -> None:
    """It decodes with the weights of `path`, under this name. The prompt is not one that was asked before: its keys and values would be others'."""
    salt = {"extra_key": version + path.name}
    answer = await engine.generate(asking(12, **salt))
    torch.testing.assert_close(logged(answer), models.written(path, PROMPT, answer["output_ids"]), atol=tolerance, rtol=0)
    assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 12}]
    assert await engine.version() == version


async def test_an_idle_engine_takes_them_at_once(engine: Engine, models: Models, tolerance: float):
    status, answer = await engine.post("/update_weights_from_disk", update(models.b))
    message = "Succeeded to update model weights. Weight version updated to 1:1."
    assert (status, answer) == (200, {"success": True, "message": message, "num_paused_requests": 0})
    await serves(engine, models, models.b, "1:1", tolerance)
    info = (await engine.get("/model_info")).body
    assert info["model_path"] == str(models.b)
    assert info["tokenizer_path"] != str(models.b)
    assert await engine.post("/update_weights_from_disk", update(models.a, None)) == (
        200,
        {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0},
    )
    await serves(engine, models, models.a, "1:1", tolerance)


async def test_in_place_running_requests_go_on_in_a_span_of_the_new_version(engine: Engine, models: Models, tolerance: float):
    """The boundary is exact within the lag that the engine itself declares."""
    async with engine.running(2, tokens=SOON) as running:
        await engine.control.pause("in_place")
        await engine.control.update_from_disk(str(models.b), "1:1", deadline_s=120)
        await engine.control.resume()
        lag = await engine.span_lag()
        assert lag in {0, 1}
        for one in running:
            answer = await one.answer()
            check_in_place(answer, split(answer, "1:0", "1:1"), models, PROMPT, lag=lag, tolerance=tolerance)
            assert answer["meta_info"]["num_retractions"] == 0
    await serves(engine, models, models.b, "1:1", tolerance)


async def test_retracted_requests_are_read_anew_by_the_new_version(engine: Engine, models: Models, tolerance: float):
    async with engine.running(2, tokens=SOON) as running:
        await engine.control.pause("retract")
        status, _ = await engine.post("/update_weights_from_disk", update(models.b, flush_cache=True))
        assert status == 200
        await engine.control.resume()
        for one in running:
            answer = await one.answer()
            check_recomputed(answer, split(answer, "1:0", "1:1"), models, PROMPT, tolerance=tolerance)
            assert answer["meta_info"]["num_retractions"] == 1
    await serves(engine, models, models.b, "1:1", tolerance)


async def test_after_a_pause_by_abort_all_is_new(engine: Engine, models: Models, tolerance: float):
    async with engine.running(2) as running:
        await engine.control.pause("abort")
        late = asyncio.create_task(engine.generate(asking(20)))
        assert (await engine.post("/update_weights_from_disk", update(models.b, flush_cache=True))).status == 200
        await engine.control.resume()
        for one in running:
            answer = await one.answer()
            assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["1:0"]
        answer = await late
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["1:1"]
        torch.testing.assert_close(logged(answer), models.written(models.b, PROMPT, answer["output_ids"]), atol=tolerance, rtol=0)


async def test_a_flush_that_requests_prevent_fails_after_the_weights_changed(engine: Engine, models: Models):
    """Tokens say the new version, and the engine itself the old one: so the project never asks for one in place."""
    async with engine.running(1, tokens=SOON) as (one,):
        await engine.post("/pause_generation", {"mode": "in_place"})
        status, answer = await engine.post("/update_weights_from_disk", update(models.b, flush_cache=True))
        assert (status, answer["success"]) == (400, False)
        assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
        assert await engine.version() == "1:0"
        await engine.post("/continue_generation")
        split(await one.answer(), "1:0", "1:1")


async def test_without_a_pause_running_requests_are_finished_first_and_new_ones_wait(engine: Engine, models: Models):
    async with engine.running(1, tokens=SOON) as (one,):
        pending = asyncio.create_task(engine.post("/update_weights_from_disk", update(models.b)))
        _, waiting = await asyncio.wait({pending}, timeout=0.1)
        late = asyncio.create_task(engine.generate(asking(5)))
        answer = await one.answer()
        assert waiting
        assert answer["meta_info"]["weight_versions"] == [{"version": "1:0", "start": 0, "end": SOON}]
        assert (await pending).status == 200
        assert (await late)["meta_info"]["weight_versions"] == [{"version": "1:1", "start": 0, "end": 5}]


async def test_running_requests_can_be_ended_by_the_update(engine: Engine, models: Models):
    """Without a flush: real engines may be asked for it before the last of those requests is gone, and then fail."""
    async with engine.running(1) as (one,):
        assert (await engine.post("/update_weights_from_disk", update(models.b, abort_all_requests=True, flush_cache=False))).status == 200
        assert (await one.answer())["meta_info"]["finish_reason"]["type"] == "abort"
    assert await engine.version() == "1:1"


async def test_a_folder_without_weights_changes_nothing(engine: Engine, models: Models, tolerance: float, tmp_path: Path):
    for folder in (tmp_path, tmp_path / "none"):
        status, answer = await engine.post("/update_weights_from_disk", update(folder))
        assert (status, answer["success"], bool(answer["message"])) == (400, False, True)
        with pytest.raises(ApplyFailed, match="update_weights_from_disk answered 400"):
            await engine.control.update_from_disk(str(folder), "1:1", deadline_s=120)
    assert (await engine.post("/update_weights_from_disk", {})).status == 400
    await serves(engine, models, models.a, "1:0", tolerance)


async def test_a_version_as_the_store_writes_it_can_be_loaded(engine: Engine, models: Models, tolerance: float, tmp_path: Path):
    store = DirectoryStore(tmp_path, models.a)
    with open_tensors(models.b / "model.safetensors") as tensors:
        store.write(Snapshot(version=Version(1, 3), tensors=tensors))
    await engine.control.update_from_disk(str(store.path(Version(1, 3))), "1:3", deadline_s=120)
    await serves(engine, models, models.b, "1:3", tolerance)


async def test_the_checksum_is_of_the_weights_and_of_nothing_else(engine: Engine, models: Models):
    before = await engine.checksum()
    assert (await engine.post("/update_weight_version", {"new_version": "1:9"})).status == 200
    assert await engine.checksum() == before
    await engine.control.update_from_disk(str(models.b), "1:1", deadline_s=120)
    changed = await engine.checksum()
    await engine.control.update_from_disk(str(models.a), "1:2", deadline_s=120)
    assert (changed != before, await engine.checksum()) == (True, before)
    answer = await engine.control.weights_checksum(deadline_s=120)
    (rank,) = answer["ranks"]
    assert rank["checksums"]["model.norm.weight"]
    assert rank["parallelism_info"][0]["tp_size"] == 1
    assert await engine.post("/weights_checker", {"action": "guess"}) == (400, {"success": False, "message": "Unsupported action='guess'"})
