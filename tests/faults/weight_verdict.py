"""What must hold of engines whatever is killed around them, asked of the engines themselves and of the audit.

registry ──► answer to a request ──► version, checksums, version again     of every engine, all the time
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import orjson

from producer.engine.client import EngineClient, Sampling
from protocol.errors import EngineUnavailable, SampleFailed
from protocol.messages import EngineStatus, Event
from protocol.versions import Version
from tests.faults.weight_stand import SERVER, Stand
from tests.faults.weight_trainer import TOLD
from weightsync.control import EngineControl
from weightsync.equality import Held, look

_ASK_S = 8.0
"""A request may wait out a whole update."""
_REST_S = 0.15
_SETTLED_S = 240.0
_PROMPT = [1, 7, 9]
_TOKENS = 6


class Watch:
    """`async with watching(stand) as watch`. A failure of a look is no problem while somebody is being killed; a wrong answer always is."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._client = EngineClient(stand.session)
        self._told: dict[str, Mapping[str, str]] = {}
        self.problems: list[str] = []
        self.compared: Counter[str] = Counter()
        """Looks that found the bytes of the version that the engine answered under, by boot."""
        self.versions: set[str] = set()
        """That were found so."""

    async def forever(self) -> None:
        while True:
            await asyncio.gather(*(self.look(engine) for engine in await self._stand.registry.routable()))
            await asyncio.sleep(_REST_S)

    async def look(self, engine: EngineStatus) -> bool:
        """Whether the engine could be looked at, which finds every lie it tells."""
        try:
            answer = await self._client.generate(
                engine.url, _PROMPT, sampling=Sampling(max_new_tokens=_TOKENS, ignore_eos=True), rid=uuid.uuid4().hex, deadline_s=_ASK_S
            )
        except (EngineUnavailable, SampleFailed):
            return False
        if not (wrote := [span.version for span in answer.spans]):  # ended before its first token, by an update that went wrong
            return False
        if engine.version is not None and wrote[0] < engine.version:
            self.problems.append(f"{engine.engine_id} is routed as {engine.version}, and answers under {wrote[0]}")
        if wrote != sorted(wrote):
            self.problems.append(f"{engine.engine_id} goes back within an answer: {wrote}")
        held = await look(engine, EngineControl(self._stand.session, engine.url), deadline_s=_ASK_S)
        return isinstance(held, Held) and self._compare(engine, held, wrote[-1])

    def _compare(self, engine: EngineStatus, held: Held, wrote: Version) -> bool:
        if Version.parse(held.version) < wrote:
            self.problems.append(f"{engine.engine_id} wrote under {wrote}, and then says that it serves {held.version}")
        published = self._published(held.version)
        if published is None:
            self.problems.append(f"{engine.engine_id} serves {held.version}, which was never published")
        elif wrong := [name for name in sorted(published) if held.ranks[0].get(name) != published[name]]:
            self.problems.append(f"{engine.engine_id} serves {held.version} with other bytes: {len(wrong)} of {len(published)} tensors, the first {wrong[0]}")
        else:
            self.compared[engine.boot_nonce] += 1
            self.versions.add(held.version)
            return True
        return False

    def _published(self, version: str) -> Mapping[str, str] | None:
        if version not in self._told:
            lines = (self._stand.folder / TOLD).read_bytes().splitlines()
            self._told = {row["version"]: row["checksums"] for row in map(orjson.loads, lines)}
        return self._told.get(version)

    async def settled(self) -> None:
        """Every engine serves, holds what it serves, and none is paused."""
        async with asyncio.timeout(_SETTLED_S):
            for engine in await self._stand.registry.engines():
                while not await self.look(engine):
                    if self.problems:
                        return
                await self._goes_on(engine)

    async def _goes_on(self, engine: EngineStatus) -> None:
        """An update may be under way at any moment, and ends."""
        control = EngineControl(self._stand.session, engine.url)
        while not await control.ready(deadline_s=_ASK_S):
            await asyncio.sleep(_REST_S)


@contextlib.asynccontextmanager
async def watching(stand: Stand) -> AsyncIterator[Watch]:
    watch = Watch(stand)
    task = asyncio.create_task(watch.forever(), name="faults:watch")
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def unfit_problems(stand: Stand, events: Sequence[Event], victim: str, kills: int) -> list[str]:
    """Engines that lost their route without having been hit. Each kill of a weight server hits at most the one engine that it was sending to."""
    hit = stand.engine_id(victim)
    lost = [event for event in events if event.op in ("unfit", "engine_left") and event.fields["engine_id"] != hit]
    excused = kills if victim == SERVER else 0
    if len(lost) <= excused and all(event.op == "unfit" for event in lost):
        return []
    return [f"{event.fields['engine_id']} was not hit, and lost its route: {event.op} {event.fields.get('reason', '')}" for event in lost]
