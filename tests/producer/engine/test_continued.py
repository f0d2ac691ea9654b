"""What our side does, on a real embedded engine: a response that was cut goes on as if it had not been, and its weights are those that were published."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from producer.draft import Draft
from producer.engine.client import ABORTED, EngineClient, Sampling
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from producer.template import PromptEncoder
from protocol.messages import EngineState, EngineStatus, Manifest
from protocol.versions import Version
from weightsync.control import EngineControl
from weightsync.equality import Verdict, check_engines
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore

from .conftest import EOS, StartEngine, write_model
from .test_server import generating, go_on

UNKNOWN = 3
"""The last of the special tokens."""
PROMPT = [1, 4, 7, 9]
SAMPLING = Sampling(max_new_tokens=300, temperature=0.0, ignore_eos=True)


async def test_a_response_that_is_cut_again_and_again_is_token_for_token_the_one_that_is_not(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path
):
    client, draft = EngineClient(session), Draft(SAMPLING, PromptEncoder(str(model_a)).decode)
    uncut = await client.generate(engine.url, PROMPT, sampling=SAMPLING, rid="uncut", deadline_s=60)
    cuts = 0
    async with asyncio.timeout(60):
        while not draft.ended:
            asking = asyncio.create_task(client.generate(engine.url, draft.prompt(PROMPT), sampling=draft.rest(), rid=f"cut-{cuts}", deadline_s=60))
            if cuts < 3:
                await generating(engine, engine.counters.generated_tokens + 20)
                await client.abort(engine.url, f"cut-{cuts}")
            go_on(engine)
            piece = await asking
            cuts += piece.finish_reason == ABORTED
            draft = draft.plus(piece)
    assert cuts == 3
    assert len(draft.pieces) >= 3
    whole = draft.whole()
    assert whole.output_ids.tolist() == uncut.output_ids.tolist()
    np.testing.assert_allclose(whole.logprobs, uncut.logprobs, atol=2e-4)
    assert whole.spans == uncut.spans
    assert (whole.text, whole.finish_reason) == (uncut.text, "length")


@pytest.mark.parametrize("by", ["eos", "stop_token_ids", "stop"])
async def test_a_response_that_is_cut_right_after_its_end_is_the_one_that_is_not_cut(
    start_engine: StartEngine, session: aiohttp.ClientSession, tmp_path: Path, by: str
):
    """This engine looks for an end before it lets go; one that does not answers what this one writes when it may not look."""
    client = EngineClient(session)
    async with start_engine(path=write_model(tmp_path / "before", seed=1)) as engine:
        ids = (await client.generate(engine.url, PROMPT, sampling=SAMPLING, rid="all", deadline_s=60)).output_ids.tolist()
    last = max(place for place, token in enumerate(ids) if token not in ids[:place] and token > UNKNOWN and EOS not in ids[:place])
    assert last, "what ends it should come after another token"
    path = write_model(tmp_path / "model", seed=1, eos_token_id=[EOS, ids[last]] if by == "eos" else EOS)
    decode = PromptEncoder(str(path)).decode
    ways: dict[str, Any] = {"stop_token_ids": {"stop_token_ids": (ids[last],)}, "stop": {"stop": (decode(ids[last : last + 1]),)}}
    sampling = Sampling(max_new_tokens=300, temperature=0.0, **ways.get(by, {}))
    async with start_engine(path=path) as engine:
        assert decode.eos_ids == load(str(path), slots=1).eos_ids
        uncut = await client.generate(engine.url, PROMPT, sampling=sampling, rid="uncut", deadline_s=60)
        blind = dataclasses.replace(SAMPLING, max_new_tokens=last + 1)
        cut = dataclasses.replace(await client.generate(engine.url, PROMPT, sampling=blind, rid="cut", deadline_s=60), finish_reason=ABORTED)
    draft = Draft(sampling, decode).plus(cut)
    assert draft.ended
    whole = draft.whole()
    assert whole.output_ids.tolist() == uncut.output_ids.tolist() == ids[: last + 1]
    assert (whole.text, whole.finish_reason, whole.matched) == (uncut.text, "stop", uncut.matched)


@pytest.mark.parametrize("damaged", [False, True])
async def test_an_engine_is_compared_with_the_version_that_was_published(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, model_b: Path, tmp_path: Path, damaged: bool
):
    store = DirectoryStore(tmp_path / "store", model_b)
    with open_tensors(model_b / "model.safetensors") as tensors:
        held: dict[str, TensorBytes] = {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=bytes(one.data)) for name, one in tensors.items()}
    manifest = await asyncio.to_thread(store.write, Snapshot(version=Version(1, 1), tensors=held))
    name = min(held)
    served = dict(held)
    if damaged:
        data = bytearray(held[name].data)
        data[0] ^= 1
        served[name] = TensorBytes(dtype=held[name].dtype, shape=held[name].shape, data=bytes(data))
    other = DirectoryStore(tmp_path / "other", model_b)
    loaded = await asyncio.to_thread(other.write, Snapshot(version=Version(1, 1), tensors=served))
    control = EngineControl(session, engine.url)
    await control.update_from_disk(loaded.location, "1:1", deadline_s=60)

    async def manifest_of(version: str) -> Manifest | None:
        return manifest if version == "1:1" else None

    async def whole(_: Manifest) -> Path:
        raise AssertionError("the types are equal")

    status = EngineStatus(engine_id="e0", boot_nonce="b", url=engine.url, kind="embedded", state=EngineState.ROUTABLE)
    [finding] = await check_engines([status], lambda _: control, manifest_of=manifest_of, whole=whole, deadline_s=60)
    assert (finding.verdict, finding.version) == (Verdict.DIFFERS if damaged else Verdict.SAME, "1:1")
    assert (name in finding.why) is damaged


async def test_what_the_embedded_engine_says_of_itself(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    """It keeps nothing of a request that is over and works ahead of nothing, so no mode is unsafe and no token lags."""
    control = EngineControl(session, engine.url)
    await control.close_session()
    known: Any = await control.dialect()
    assert (known.version, known.sessions, known.spans, known.prefix_cache, known.overlap) == ("embedded", True, True, False, False)
    assert [known.pause_mode(mode) for mode in ("in_place", "retract", "abort")] == ["in_place", "retract", "abort"]
    assert known.span_lag("in_place") == 0
    assert await control.begin_session() is True
    assert await control.begin_session() is True, "the one left open is ended first"
    await control.end_session()
    assert await control.ready() is True
