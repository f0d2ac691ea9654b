"""The weight endpoints of an engine as a process: real HTTP, a real process group, real tensors. `python receiver.py` prints its address.

It is killed, hung and made to refuse by the tests: `POST /stage {"next": mode}` says how the next update ends.
  post: as it should. refuse: 400 before the collective. never_post: takes the call and does not join the broadcast.
  die: SIGKILL to itself when the call is there.
  hang: never answers, though it received.
  wait: the next group is entered only once another mode is staged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from aiohttp import web
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

_TIMEOUT = timedelta(seconds=60)


class Receiver:
    def __init__(self, *, sessions: bool) -> None:
        self.sessions = sessions
        self.in_session = False
        self.groups: dict[str, Any] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.version = "boot"
        self.mode = "post"
        self.calls: list[str] = []
        self.failures: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/init_weights_update_group", self.init)
        app.router.add_post("/destroy_weights_update_group", self.destroy)
        app.router.add_post("/update_weights_from_distributed", self.update)
        app.router.add_post("/update_weights_from_tensor", self.update_from_tensor)
        app.router.add_post("/generate", self.generate)
        if self.sessions:
            app.router.add_post("/begin_weight_update", self.begin)
            app.router.add_post("/end_weight_update", self.end)
        app.router.add_post("/stage", self.stage)
        app.router.add_get("/seen", self.seen)
        return app

    async def stage(self, request: web.Request) -> web.Response:
        self.mode = (await request.json())["next"]
        return web.json_response({})

    async def seen(self, _: web.Request) -> web.Response:
        sums = {name: xxhash.xxh3_64_hexdigest(_bytes(tensor)) for name, tensor in self.weights.items()}
        return web.json_response({
            "version": self.version, "checksums": sums, "groups": sorted(self.groups), "calls": self.calls, "failures": self.failures,
            "in_session": self.in_session,
        })  # fmt: skip

    async def init(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("init")
        while self.mode == "wait":
            await asyncio.sleep(0.01)

        def join() -> Any:
            store, rank, size = next(
                rendezvous(f"tcp://{body['master_address']}:{body['master_port']}", body["rank_offset"], body["world_size"], timeout=_TIMEOUT)
            )
            store.set_timeout(_TIMEOUT)
            name = body["group_name"]
            group, _ = _new_process_group_helper(size, rank, [], Backend(body["backend"]), PrefixStore(name, store), group_name=name, timeout=_TIMEOUT)
            _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
            return group

        return await self._try(join, lambda group: self.groups.__setitem__(body["group_name"], group))

    async def destroy(self, request: web.Request) -> web.Response:
        name = (await request.json())["group_name"]
        self.calls.append("destroy")
        if name not in self.groups:
            return _answer(ok=False, message="no such group")
        group = self.groups.pop(name)
        return await self._try(lambda: dist.destroy_process_group(group))

    async def begin(self, _: web.Request) -> web.Response:
        self.calls.append("begin")
        if self.in_session:
            return _answer(ok=False, message="already open")
        self.in_session = True
        return _answer()

    async def end(self, _: web.Request) -> web.Response:
        self.calls.append("end")
        if not self.in_session:
            return _answer(ok=False, message="none is open")
        self.in_session = False
        return _answer()

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append("update")
        if body["load_format"] != "flattened_bucket" or body["flush_cache"] or body["abort_all_requests"] or (self.sessions and not self.in_session):
            return _answer(ok=False, message=f"not a call that is good while requests are alive: {body}")
        mode, self.mode = self.mode, "post"
        if mode == "refuse":
            return _answer(ok=False, message="not these weights")
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "never_post":
            await asyncio.sleep(60)
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(dtypes, body["shapes"], strict=True)]
        group = self.groups[body["group_name"]]

        def receive() -> None:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            group.broadcast([flat], options).wait()
            for name, dtype, shape, part in zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True):
                self.weights[name] = part.view(dtype).reshape(shape)
            if body["weight_version"]:
                self.version = body["weight_version"]

        answer = await self._try(receive)
        if mode == "hang":
            await asyncio.sleep(60)
        return answer

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(f"tensor:{','.join(body['serialized_named_tensors'])}:{body['load_format']}")
        if self.mode == "refuse":
            return _answer(ok=False, message="not these handles")
        self.version = body["weight_version"]
        return _answer()

    async def generate(self, _: web.Request) -> web.Response:
        self.calls.append("generate")
        return web.json_response({"output_ids": [1], "meta_info": {"weight_version": self.version}})

    async def _try(self, work: Any, then: Any = lambda _: None) -> web.Response:
        try:
            result = await asyncio.to_thread(work)
        except (RuntimeError, ValueError) as problem:
            self.failures.append(str(problem)[:200])
            return _answer(ok=False, message=str(problem)[:200])
        then(result)
        return _answer()


def _answer(*, ok: bool = True, message: str = "") -> web.Response:
    return web.json_response({"success": ok, "message": message}, status=200 if ok else 400)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


async def main() -> None:
    runner = web.AppRunner(Receiver(sessions="--sessions" in sys.argv).app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
