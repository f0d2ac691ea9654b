from __future__ import annotations

import asyncio
import dataclasses
import doctest
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import xxhash
from aiohttp import web

from protocol.errors import WeightError
from protocol.messages import EngineState, EngineStatus, Manifest
from protocol.versions import Version
from weightsync import equality
from weightsync.control import EngineControl
from weightsync.equality import Finding, Held, Verdict, check_engines, checksums, judge
from weightsync.snapshot import Snapshot, TensorBytes

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def test_the_worked_example_holds():
    assert doctest.testmod(equality).failed == 0


def held(engine: str, version: str = "1:2", *, published: bool = False, stored: bool = False, layout: str = "l", dtype: str = "", **tensors: str) -> Held:
    return Held(engine_id=engine, version=version, dtype=dtype, layout=layout, ranks=(tensors,), published_names=published, from_store=stored)


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {finding.engine_id: finding.verdict.value for finding in found}


def test_engines_of_one_version_and_layout_must_agree_and_others_are_not_compared():
    found = judge([held("a", w="1", v="2"), held("b", w="1", v="2"), held("c", w="1", v="9"), held("d", "1:3", w="5"), held("e", layout="tp2", w="7")], {})
    assert verdicts(found) == {"a": "agree", "b": "agree", "c": "differs", "d": "alone", "e": "alone"}
    assert "with each other only" in found[0].why
    assert found[2].why == "from a: 1 of 2 tensors, the first v"
    assert "not compared" in found[3].why


def test_an_engine_that_loaded_from_the_store_outranks_a_majority():
    found = judge([held("a", w="1"), held("b", w="1"), held("c", stored=True, w="2"), held("d", w="2")], {})
    assert verdicts(found) == {"a": "differs", "b": "differs", "c": "same", "d": "same"}
    assert [one.why for one in found] == ["from c (from the store): 1 of 1 tensors, the first w"] * 2 + ["", ""]


def test_engines_that_loaded_from_the_store_and_disagree_are_judged_by_most_of_them():
    found = judge([held("a", stored=True, w="1"), held("b", stored=True, w="2"), held("c", w="2")], {})
    assert verdicts(found) == {"a": "differs", "b": "differs", "c": "differs"}
    found = judge([held("a", stored=True, w="1"), held("b", stored=True, w="2"), held("c", stored=True, w="2"), held("d", w="1")], {})
    assert verdicts(found) == {"a": "differs", "b": "same", "c": "same", "d": "differs"}
    assert found[3].why.startswith("from b ")


def test_two_that_disagree_are_both_named():
    assert verdicts(judge([held("a", w="1"), held("b", w="2")], {})) == {"a": "differs", "b": "differs"}


def test_a_rank_that_differs_is_found_behind_one_that_does_not():
    ranks = [({"w": "1"}, {"w": "2"}), ({"w": "1"}, {"w": "2"}), ({"w": "1"}, {"w": "3"})]
    engines = [Held(engine_id=name, version="1:2", dtype="", layout="tp2", ranks=two, published_names=False) for name, two in zip("abc", ranks, strict=True)]
    assert verdicts(judge(engines, {})) == {"a": "agree", "b": "agree", "c": "differs"}


def test_the_published_version_outranks_a_majority():
    engines = [held("a", published=True, w="1"), held("b", published=True, w="1"), held("c", published=True, w="2")]
    found = judge(engines, {("1:2", ""): {"w": "2"}})
    assert verdicts(found) == {"a": "differs", "b": "differs", "c": "same"}
    assert found[0].why == "1 of 1 tensors, the first w"


def test_missing_tensors_are_named_and_a_tied_output_layer_is_not_missing():
    [found] = judge([held("a", published=True, w="1")], {("1:2", ""): {"w": "1", "x": "2"}})
    assert (found.verdict, found.why) == (Verdict.DIFFERS, "1 tensors are on one side only, the first x")
    [tied] = judge([held("a", published=True, w="1", **{"lm_head.weight": "1"})], {("1:2", ""): {"w": "1"}})
    assert tied.verdict is Verdict.SAME


def test_a_version_is_compared_in_the_type_that_the_engine_computes_in(store: Any, snapshot: Any, tmp_path: Path):
    """The reference is rounded here by hand: to nearest, ties to even."""
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], "<f4")
    tensors = {"w": TensorBytes(dtype="F32", shape=(4,), data=values.tobytes()), "n": TensorBytes(dtype="I64", shape=(), data=bytes(8))}
    manifest = store.write(Snapshot(version=Version(1, 2), tensors=tensors))
    rounded = np.array([0x3F80, 0x3F80, 0x3F82, 0xC020], "<u2").tobytes()
    as_it_is = {"w": xxhash.xxh3_64_hexdigest(values.tobytes()), "n": xxhash.xxh3_64_hexdigest(bytes(8))}
    assert checksums(manifest, "", None) == checksums(manifest, "float32", None) == as_it_is
    assert checksums(manifest, "bfloat16", Path(manifest.location)) == as_it_is | {"w": xxhash.xxh3_64_hexdigest(rounded)}
    with pytest.raises(WeightError, match="not at hand"):
        checksums(manifest, "bfloat16", None)


class Checked:
    """An engine that answers `/weights_checker`."""

    def __init__(self, tensors: dict[str, str], version: str = "1:2", dtype: str = "auto") -> None:
        self.tensors, self.dtype = tensors, dtype
        self.versions = iter([version] * 100)
        self.refuses = False
        self.url = ""

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": next(self.versions)})

    async def settings(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "dtype": self.dtype})

    async def check(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"action": "checksum"}
        if self.refuses:
            return web.json_response({"success": False, "message": "no"}, status=400)
        rank = {"checksums": self.tensors, "per_gpu_checksum": "x", "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1}]}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": "y"})


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Any]:
    runners: list[web.AppRunner] = []

    async def start(engine: Checked) -> Checked:
        app = web.Application()
        app.router.add_get("/model_info", engine.info)
        app.router.add_get("/server_info", engine.settings)
        app.router.add_post("/weights_checker", engine.check)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return engine

    yield start
    await asyncio.gather(*(runner.cleanup() for runner in runners))


async def check(
    rig: Any, store: Any, engines: dict[str, Checked], kind: str = "sglang", manifest: Manifest | None = None, *, said: Any = None
) -> list[Finding]:
    async def manifest_of(version: str) -> Manifest | None:
        return manifest if manifest is not None and version == str(manifest.version) else None

    async def whole(_: Manifest) -> Path:
        assert manifest is not None
        return Path(manifest.location)

    plain = {name: EngineStatus(engine_id=name, boot_nonce="b", url=one.url, kind=kind, state=EngineState.ROUTABLE) for name, one in engines.items()}
    statuses = [dataclasses.replace(status, **(said or {}).get(name, {})) for name, status in plain.items()]
    return await check_engines(statuses, lambda engine: EngineControl(rig.session, engine.url), manifest_of=manifest_of, whole=whole, deadline_s=60)


async def test_fused_names_are_compared_among_engines_only(rig: Any, store: Any, serve: Any):
    good, bad = {QKV: "d8aefcd69117246f"}, {QKV: "0000000000000000"}
    engines = {"a": await serve(Checked(good)), "b": await serve(Checked(good)), "c": await serve(Checked(bad))}
    found = await check(rig, store, engines)
    assert verdicts(found) == {"a": "agree", "b": "agree", "c": "differs"}
    assert QKV in found[2].why


@pytest.mark.parametrize(
    ("served", "transport", "expected"),
    [("1:2", "store", {"a": "differs", "b": "differs", "c": "same"}), ("1:2", "nccl", {"a": "agree", "b": "agree", "c": "differs"}),
     ("1:1", "store", {"a": "agree", "b": "agree", "c": "differs"})],
    ids=["from the store", "another way", "the store brought an older one"],
)  # fmt: skip
async def test_what_an_engine_loaded_from_the_store_is_what_was_published(
    rig: Any, store: Any, serve: Any, served: str, transport: str, expected: dict[str, str]
):
    engines = {"a": await serve(Checked({QKV: "1"})), "b": await serve(Checked({QKV: "1"})), "c": await serve(Checked({QKV: "2"}))}
    said = {"c": {"transport": transport, "version": Version.parse(served)}}
    assert verdicts(await check(rig, store, engines, said=said)) == expected


async def test_an_engine_that_keeps_the_published_names_is_compared_with_what_was_published(rig: Any, store: Any, serve: Any):
    manifest = await asyncio.to_thread(store.write, rig.snapshot(1, 2))
    right = {entry.name: entry.checksum for entry in manifest.tensors}
    wrong = right | {"model.norm.weight": "0" * 16}
    engines = {"a": await serve(Checked(right)), "b": await serve(Checked(wrong)), "c": await serve(Checked(right, "1:9"))}
    found = await check(rig, store, engines, "embedded", manifest)
    assert verdicts(found) == {"a": "same", "b": "differs", "c": "alone"}
    assert "model.norm.weight" in found[1].why


async def test_an_engine_in_another_type_is_compared_in_that_type(rig: Any, store: Any, serve: Any):
    manifest = await asyncio.to_thread(store.write, rig.snapshot(1, 2))
    rounded = dict(await asyncio.to_thread(checksums, manifest, "bfloat16", Path(manifest.location)))
    engines = {"a": await serve(Checked(rounded, dtype="bfloat16"))}
    assert verdicts(await check(rig, store, engines, "embedded", manifest)) == {"a": "same"}
    engines["a"].dtype = "float32"
    [found] = await check(rig, store, engines, "embedded", await asyncio.to_thread(store.write, rig.snapshot(1, 2)))
    assert found.verdict is Verdict.DIFFERS


async def test_one_that_moves_is_asked_again_and_one_that_refuses_is_unknown(rig: Any, store: Any, serve: Any):
    moving, restless, refusing = Checked({"w": "1"}), Checked({"w": "1"}), Checked({"w": "1"})
    moving.versions = iter(["1:1", "1:2", "1:2", "1:2"])
    restless.versions = iter([f"1:{n}" for n in range(100)])
    refusing.refuses = True
    engines = {"a": await serve(moving), "b": await serve(restless), "c": await serve(refusing), "d": await serve(Checked({"w": "1"}))}
    found = await check(rig, store, engines)
    assert verdicts(found) == {"a": "agree", "b": "unknown", "c": "unknown", "d": "agree"}
    assert "new version each time" in found[1].why
    assert "no" in found[2].why
