"""Updates through process groups and sessions: a real engine over HTTP, real gloo, and senders that do everything wrong."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
import xxhash
from transformers import AutoModelForCausalLM

from producer.engine.embedded.server import EmbeddedEngine
from producer.engine.embedded.session import announced
from protocol.errors import ManifestError

from .conftest import StartEngine, written_logprobs
from .group_sender import Sender, flattened, ordered
from .test_server import PROMPT, body, generating, get, go_on, post

_NAMES = itertools.count()
_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
Connect = Callable[[EmbeddedEngine], Awaitable[Sender]]


@pytest.fixture(scope="session", autouse=True)
def first_store() -> None:
    """The first store that listens in a process opens a pipe that torch keeps."""
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture(scope="module", autouse=True)
def no_default_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest_asyncio.fixture
async def engine(start_engine: StartEngine) -> AsyncIterator[EmbeddedEngine]:
    async with start_engine(group_timeout_s=60.0) as running:
        yield running


@pytest_asyncio.fixture
async def hasty_engine(start_engine: StartEngine) -> AsyncIterator[EmbeddedEngine]:
    """Waits in vain not as long as the other."""
    async with start_engine(group_timeout_s=3.0) as running:
        yield running


def where(name: str, port: int, **changed: Any) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name, "backend": "gloo"} | changed


def bucket(tensors: dict[str, torch.Tensor], group: str, version: str | None = None, **changed: Any) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": group,
        "flush_cache": False,
        "weight_version": version,
        "load_format": "flattened_bucket",
    } | changed


@pytest_asyncio.fixture
async def connect(session: aiohttp.ClientSession) -> AsyncIterator[Connect]:
    senders: list[Sender] = []

    async def connected(engine: EmbeddedEngine) -> Sender:
        sender = Sender(f"wg-{next(_NAMES)}")
        senders.append(sender)
        status, answer = await sender.meet(asyncio.create_task(post(session, engine, "/init_weights_update_group", where(sender.name, sender.port))))
        assert (status, answer) == (200, {"success": True, "message": "Succeeded to initialize custom process group."})
        return sender

    yield connected
    for sender in senders:
        sender.leave()


async def transfer(session: aiohttp.ClientSession, engine: EmbeddedEngine, sender: Sender, wanted: dict[str, Any], *sent: torch.Tensor) -> tuple[int, Any]:
    """One bucket, sent while the engine receives."""
    answer, problem = await asyncio.gather(
        post(session, engine, "/update_weights_from_distributed", wanted), asyncio.to_thread(sender.send, *sent), return_exceptions=True
    )
    assert isinstance(answer, tuple)
    assert problem is None or isinstance(problem, RuntimeError)
    return answer


async def serves(session: aiohttp.ClientSession, engine: EmbeddedEngine, folder: Path, version: str) -> None:
    """It decodes, and with the weights of `folder` under the name `version`."""
    status, answer = await post(session, engine, "/generate", body(6))
    assert status == 200
    own = written_logprobs(AutoModelForCausalLM.from_pretrained(folder), PROMPT, answer["output_ids"])
    torch.testing.assert_close(torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]), own, atol=1e-4, rtol=0)
    assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 6}]
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == version


def halves(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = list(ordered(folder).items())
    return dict(tensors[:10]), dict(tensors[10:])


async def test_buckets_are_served_together_with_the_call_that_names_the_version(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    sender, (first, last) = await connect(engine), halves(model_b)
    assert await post(session, engine, "/begin_weight_update", {}) == (200, {"success": True, "message": "Success"})
    success = {"success": True, "message": "Succeeded to update parameter online."}
    assert await transfer(session, engine, sender, bucket(first, sender.name), flattened(first)) == (200, success)
    await serves(session, engine, model_a, "1:0")
    success["message"] += " Weight version updated to 1:1."
    assert await transfer(session, engine, sender, bucket(last, sender.name, "1:1"), flattened(last)) == (200, success)
    await serves(session, engine, model_b, "1:1")
    assert await post(session, engine, "/end_weight_update", {}) == (200, {"success": True, "message": "Success"})
    destroyed = {"success": True, "message": "Succeeded to destroy custom process group."}
    assert await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name}) == (200, destroyed)
    gone = {"success": False, "message": "The group to be destroyed does not exist."}
    assert await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name}) == (400, gone)


async def test_one_broadcast_a_tensor_in_another_type_and_the_end_of_the_session_serve_the_whole_model(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_b: Path
):
    sender = await connect(engine)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in ordered(model_b).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied: checked, not used
    await post(session, engine, "/begin_weight_update")
    assert (await transfer(session, engine, sender, bucket(tensors, sender.name, load_format=None), *tensors.values()))[0] == 200
    assert (await post(session, engine, "/end_weight_update"))[0] == 200
    _, answer = await post(session, engine, "/weights_checker", {"action": "checksum"})
    expected = {name: xxhash.xxh3_64_hexdigest(tensor.float().numpy().tobytes()) for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert answer["ranks"][0]["checksums"] == expected
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == "1:0"


async def test_a_running_request_goes_on_in_a_span_of_the_new_version(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    """What came twice is served as it came last; it re-reads what it had under the new weights."""
    sender, tensors = await connect(engine), ordered(model_b)
    running = asyncio.create_task(post(session, engine, "/generate", body(300)))
    await generating(engine, 20)
    await post(session, engine, "/pause_generation", {"mode": "retract"})
    split = engine.counters.generated_tokens
    go_on(engine)
    await post(session, engine, "/begin_weight_update")
    assert (await transfer(session, engine, sender, bucket(tensors, sender.name), flattened(tensors)))[0] == 200
    assert (await transfer(session, engine, sender, bucket(tensors, sender.name, "1:1", flush_cache=True), flattened(tensors)))[0] == 200
    await post(session, engine, "/end_weight_update")
    await post(session, engine, "/continue_generation")
    _, answer = await running
    meta = answer["meta_info"]
    assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": split}, {"version": "1:1", "start": split, "end": 300}]
    logprobs = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    for path, part in ((model_a, slice(0, split)), (model_b, slice(split, 300))):
        own = written_logprobs(AutoModelForCausalLM.from_pretrained(path), PROMPT, answer["output_ids"])
        torch.testing.assert_close(logprobs[part], own[part], atol=1e-4, rtol=0)


async def test_a_separate_process_sends_and_one_that_is_killed_in_between_changes_nothing(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path, model_b: Path
):
    tensors = ordered(model_b)
    for mode, cut, expected in (("plain", 7, 400), ("flat", -1, 200)):
        name = f"wg-{next(_NAMES)}"
        arguments = [str(Path(__file__).with_name("group_sender.py")), str(model_b), name, mode, str(len(tensors)), str(cut)]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        port = int(await process.stdout.readline())
        assert (await post(session, engine, "/init_weights_update_group", where(name, port)))[0] == 200
        await post(session, engine, "/begin_weight_update")
        wanted = bucket(tensors, name, "1:1", load_format=None if mode == "plain" else "flattened_bucket")
        status, answer = await post(session, engine, "/update_weights_from_distributed", wanted)
        await process.communicate(b"")
        assert (status, process.returncode) == (expected, -9 if cut >= 0 else 0), answer
        assert (await post(session, engine, "/end_weight_update"))[0] == expected
        await serves(session, engine, *((model_a, "1:0") if expected == 400 else (model_b, "1:1")))


async def test_a_sender_that_never_comes_or_whose_store_is_no_store_is_refused_in_time(
    hasty_engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path
):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        asked = asyncio.create_task(post(session, hasty_engine, "/init_weights_update_group", where("mute", port)))
        status, answer = await asked
        assert (status, answer["success"]) == (400, False)
        assert answer["message"].startswith("Failed to initialize custom process group: ")
    status, answer = await post(session, hasty_engine, "/init_weights_update_group", where("nobody", port))
    assert status == 400
    assert "nobody" in answer["message"]
    await serves(session, hasty_engine, model_a, "1:0")


async def test_a_sender_that_listens_and_never_joins_is_refused_in_time(hasty_engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path):
    sender = Sender(f"wg-{next(_NAMES)}")
    running = asyncio.create_task(post(session, hasty_engine, "/generate", body(300)))
    status, answer = await post(session, hasty_engine, "/init_weights_update_group", where(sender.name, sender.port))
    assert (status, answer["success"]) == (400, False)
    assert (await running)[0] == 200
    sender.leave()
    await serves(session, hasty_engine, model_a, "1:0")


async def broken(session: aiohttp.ClientSession, engine: EmbeddedEngine, sender: Sender, answer: tuple[int, Any], reason: str) -> None:
    """The call was refused, its group is gone, and the session takes nothing more until it is ended."""
    assert answer[0] == 400
    assert answer[1]["success"] is False
    assert reason in answer[1]["message"]
    assert (await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name}))[0] == 400
    status, again = await post(session, engine, "/update_weights_from_distributed", bucket({}, "other"))
    assert (status, "takes nothing more" in again["message"]) == (400, True)
    assert (await post(session, engine, "/end_weight_update"))[0] == 400
    assert (await post(session, engine, "/begin_weight_update"))[0] == 200


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (lambda _: None, "Timed out"),
        (lambda whole: torch.cat([whole, torch.ones(1 << 20, dtype=torch.uint8)]), "more than the"),
        (lambda whole: torch.cat([whole, torch.zeros(4, dtype=torch.uint8)]), "more than the"),
        (lambda whole: whole[:-4].clone(), "fewer than the"),
        (lambda whole: whole[: len(whole) // 2].clone(), "fewer than the"),
    ],
    ids=["nothing", "much more", "one element more", "one element less", "half"],
)
async def test_other_bytes_than_announced_change_nothing(
    start_engine: StartEngine,
    session: aiohttp.ClientSession,
    connect: Connect,
    model_a: Path,
    model_b: Path,
    sent: Callable[[torch.Tensor], torch.Tensor | None],
    reason: str,
):
    async with start_engine(group_timeout_s=8.0 if reason == "Timed out" else 60.0) as engine:
        sender, tensors = await connect(engine), ordered(model_b)
        await post(session, engine, "/begin_weight_update")
        bytes_sent = sent(flattened(tensors))
        answer = await transfer(session, engine, sender, bucket(tensors, sender.name, "1:1"), *([] if bytes_sent is None else [bytes_sent]))
        await broken(session, engine, sender, answer, reason)
        await serves(session, engine, model_a, "1:0")


async def test_a_sender_that_leaves_while_it_is_waited_for_is_noticed_at_once(
    start_engine: StartEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    async with start_engine(group_timeout_s=60.0) as engine:
        sender, tensors = await connect(engine), ordered(model_b)
        await post(session, engine, "/begin_weight_update")
        waiting = asyncio.create_task(post(session, engine, "/update_weights_from_distributed", bucket(tensors, sender.name, "1:1")))
        while not engine._updates.groups._receiving:
            await asyncio.sleep(0)
        sender.leave()
        async with asyncio.timeout(60):
            await broken(session, engine, sender, await waiting, f"group {sender.name}")
        await serves(session, engine, model_a, "1:0")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"names": ["model.norm.bias"]}, "tensor model.norm.bias is not of this model"),
        ({"shapes": [[31]]}, "tensor model.norm.weight has shape [31], the model [32]"),
        ({"dtypes": ["int64"]}, "tensor model.norm.weight has dtype int64"),
        ({"dtypes": ["__class__"]}, "tensor model.norm.weight has dtype __class__"),
        ({"shapes": []}, "expected as many of each"),
        ({"names": [], "dtypes": [], "shapes": []}, "Cannot create empty tensor bucket"),
        ({"group_name": "unknown"}, "Please call `init_weights_update_group` first"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_by_name_before_anything_is_received(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, changed: dict[str, Any], reason: str
):
    sender, tensors = await connect(engine), {"model.norm.weight": torch.ones(32)}
    await post(session, engine, "/begin_weight_update")
    wanted = bucket(tensors, sender.name, "1:1") | changed
    answer = await post(session, engine, "/update_weights_from_distributed", wanted)  # no sender: nothing is waited for
    if changed.get("group_name"):
        await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name})
    await broken(session, engine, sender, answer, reason)


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "reason"),
    [
        (["model.norm.weight"] * 2, ["float32"] * 2, [[32]] * 2, "model.norm.weight is twice in a bucket"),
        (["model.norm.weight", "odd.weight"], ["bfloat16", "float64"], [[3], [2]], "Unaligned received tensor odd.weight: byte offset 6"),
    ],
)
def test_a_bucket_with_a_tensor_twice_or_askew_is_refused(names: list[str], dtypes: list[str], shapes: list[list[int]], reason: str):
    model = torch.nn.Module()
    for part, size in (("model.norm", shapes[0]), ("odd", shapes[1])):
        owner = model
        for step in part.split("."):
            if step not in dict(owner.named_children()):
                owner.add_module(step, torch.nn.Module())
            owner = owner.get_submodule(step)
        owner.weight = torch.nn.Parameter(torch.zeros(size))
    with pytest.raises(ManifestError, match=reason):
        announced(model, names, dtypes, shapes, flat=True)


async def test_an_update_without_a_session_is_refused_and_frees_the_group(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    sender, tensors = await connect(engine), ordered(model_b)
    refused = {"success": False, "message": _NO_SESSION}
    assert await transfer(session, engine, sender, bucket(tensors, sender.name, "1:1"), flattened(tensors)) == (400, refused)
    assert (await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name}))[0] == 400
    none = {"success": False, "message": "no weight-update session is open; call begin_weight_update() first"}
    assert await post(session, engine, "/end_weight_update") == (400, none)
    await serves(session, engine, model_a, "1:0")


async def test_a_session_left_open_by_a_dead_client_is_ended_without_a_trace_of_its_buckets(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    sender, (first, _) = await connect(engine), halves(model_b)
    await post(session, engine, "/begin_weight_update")
    await transfer(session, engine, sender, bucket(first, sender.name), flattened(first))
    already = {"success": False, "message": "a weight-update session is already open; call end_weight_update() first"}
    assert await post(session, engine, "/begin_weight_update") == (400, already)
    status, answer = await post(session, engine, "/end_weight_update")
    assert status == 400
    assert "10 of 24 tensors" in answer["message"]
    await serves(session, engine, model_a, "1:0")
    assert (await post(session, engine, "/begin_weight_update"))[0] == 200
    await transfer(session, engine, sender, bucket(ordered(model_b), sender.name, "1:2"), flattened(ordered(model_b)))
    await serves(session, engine, model_b, "1:2")


async def test_weights_from_disk_spoil_a_session_so_that_older_buckets_never_follow_newer_files(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    sender, tensors = await connect(engine), ordered(model_a)
    await post(session, engine, "/begin_weight_update")
    assert (await transfer(session, engine, sender, bucket(tensors, sender.name), flattened(tensors)))[0] == 200
    assert (await post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:2"}))[0] == 200
    assert "meanwhile" in (await post(session, engine, "/end_weight_update"))[1]["message"]
    await serves(session, engine, model_b, "1:2")


async def test_a_client_that_goes_away_while_a_bucket_is_received_leaves_nothing_behind(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_a: Path, model_b: Path
):
    sender, tensors = await connect(engine), ordered(model_b)
    await post(session, engine, "/begin_weight_update")
    call = asyncio.create_task(post(session, engine, "/update_weights_from_distributed", bucket(tensors, sender.name, "1:1")))
    while not engine._updates.groups._receiving:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    while engine._updates.groups._receiving:
        await asyncio.sleep(0)
    assert "went away" in (await post(session, engine, "/end_weight_update"))[1]["message"]
    assert (await post(session, engine, "/destroy_weights_update_group", {"group_name": sender.name}))[0] == 400
    await serves(session, engine, model_a, "1:0")


async def test_an_update_whose_client_goes_away_is_followed_to_its_end(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_b: Path):
    """Else the tokens would carry a version that the engine's own word denies."""
    running = asyncio.create_task(post(session, engine, "/generate", body(300)))
    await generating(engine, 5)
    update = asyncio.create_task(post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:1"}))
    while not engine._worker._updates:
        await asyncio.sleep(0)
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    go_on(engine)
    await running
    while engine._updates._followed:
        await asyncio.sleep(0)
    await serves(session, engine, model_b, "1:1")


async def test_a_flush_that_is_asked_for_while_requests_live_is_refused_as_sglang_does(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect, model_b: Path
):
    sender, tensors = await connect(engine), ordered(model_b)
    running = asyncio.create_task(post(session, engine, "/generate", body(300)))
    await generating(engine, 5)
    await post(session, engine, "/pause_generation", {"mode": "in_place"})
    go_on(engine)
    await post(session, engine, "/begin_weight_update")
    status, answer = await transfer(session, engine, sender, bucket(tensors, sender.name, "1:1", flush_cache=True), flattened(tensors))
    assert status == 400
    assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == "1:0"
    await post(session, engine, "/continue_generation")
    assert [span["version"] for span in (await running)[1]["meta_info"]["weight_versions"]] == ["1:0", "1:1"]


async def test_groups_are_refused_that_are_not_one_sender_and_this_engine_by_gloo(engine: EmbeddedEngine, session: aiohttp.ClientSession, connect: Connect):
    sender = await connect(engine)
    for wrong in ({"backend": "nccl"}, {"world_size": 3}, {"rank_offset": 0}, {"group_name": ""}, {"master_port": 0}, {"group_name": sender.name}):
        status, answer = await post(session, engine, "/init_weights_update_group", where("g", sender.port) | wrong)
        assert (status, answer["success"]) == (400, False)
    async with asyncio.timeout(60):
        for _ in range(5):  # senders that died left their groups: the oldest make room
            last = await connect(engine)
    assert engine._updates.groups.names[-1] == last.name
    assert sender.name not in engine._updates.groups.names


async def test_checksums_are_of_the_bytes_and_one_stands_for_all(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path):
    status, answer = await post(session, engine, "/weights_checker", {"action": "checksum"})
    checksums = {name: xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in ordered(model_a).items()}
    whole = hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()
    (rank,) = answer["ranks"]
    assert (status, answer["success"], answer["message"]) == (200, True, "Success.")
    assert (rank["checksums"], rank["per_gpu_checksum"]) == (checksums, whole)
    assert rank["parallelism_info"][0]["tp_size"] == 1
    assert answer["per_engine_checksum"] == hashlib.sha256(whole.encode()).hexdigest()
    assert (await get(session, engine, "/weights_checker"))[1] == answer
    assert (await post(session, engine, "/weights_checker", {"action": "reset_tensors"}))[0] == 400
