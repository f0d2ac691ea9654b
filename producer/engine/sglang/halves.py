"""Two servers that are one engine, as processes: the first to end ends both."""

from __future__ import annotations

import asyncio
from pathlib import Path

from producer.engine.sglang.child import Child


class Halves:
    """What `Child` tells of one process, of two. Whoever started them ends them."""

    def __init__(self, prefill: Child, decode: Child) -> None:
        self._prefill, self._decode = prefill, decode
        self._spoken_of = decode

    @property
    def pid(self) -> int:
        """Of the half that writes."""
        return self._decode.pid

    @property
    def log(self) -> Path:
        """Of the half that ended, or else of the one that writes."""
        return self._spoken_of.log

    async def ended(self) -> int:
        """The exit code of the first to end."""
        waits = {asyncio.create_task(half.ended(), name="engine:half"): half for half in (self._prefill, self._decode)}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            self._spoken_of = waits[first]
            return first.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def last_words(self) -> str:
        """Of the half that ended; of both where neither has."""
        if self._spoken_of.code is not None:
            return self._spoken_of.last_words()
        return f"{self._decode.last_words()}\nand of the half that reads prompts ({self._prefill.log})\n{self._prefill.last_words()}"
