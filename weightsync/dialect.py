"""What an engine can do and how it pauses safely, from its own account of itself: pure.

Sessions around updates came with SGLang 0.5.21, the version of each token with 0.5.19. What an engine does not tell is taken as the more dangerous of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

_SPANS_SINCE = (0, 5, 19)
_SESSIONS_SINCE = (0, 5, 21)
_WHOLE_SINCE = (0, 5, 23)
_ENDED_BY_UPDATES = {"speculative_algorithm": "NGRAM", "load_format": "flash_rl"}
"""Seen with 0.5.17 on a GPU: with the first, an update from files ends the server; with the second, one by any way does. 0.5.23 has other code for both."""
EMBEDDED = "embedded"
PauseMode: TypeAlias = Literal["in_place", "retract", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One boot of an engine."""

    version: str
    """SGLang's, or "embedded"; empty: not told."""
    sessions: bool
    """Distributed and tensor updates must lie between `/begin_weight_update` and `/end_weight_update`."""
    spans: bool
    """Answers say which version wrote each token."""
    prefix_cache: bool
    """Keys and values outlive their request and are used by others that begin alike."""
    overlap: bool
    """One step is under way when the engine pauses in place: its token comes from the old weights and is called the new version's."""
    ranks: int = 1
    """Tensor-parallel ranks: each joins a group, and takes its own payload of tensors."""
    replicas: int = 1
    """Data-parallel ones: with more than one, SGLang ends itself at a distributed update."""
    stages: int = 1
    """Pipeline-parallel ones: each numbers its ranks from the first in a group for updates, so with more than one such a group never forms."""

    halves: bool = False
    """Two servers of ours are one engine: one reads prompts, one writes."""

    def pause_mode(self, wanted: PauseMode) -> PauseMode:
        """`wanted`, or `abort` where that would leave keys and values of older weights to new requests.

        Between two halves they may be on their way, where no pause reaches them.
        Without spans nobody can tell a request that began before the update from one after it; before sessions the cache cannot be emptied while requests
        wait (on 0.5.17 asking for it ends the server), so what retracted requests recompute would rest on their own old prefixes.
        """
        if self.halves or (self.prefix_cache and (not self.spans or (wanted == "retract" and not self.sessions))):
            return "abort"
        return wanted

    def span_lag(self, mode: PauseMode) -> int:
        """Tokens after an update that spans give to the new version although the old weights sampled them."""
        return int(self.overlap and self.spans and self.pause_mode(mode) == "in_place")


def dialect(about: Mapping[str, Any], *, sessions: bool | None = None, spans: bool | None = None) -> Dialect:
    """From `/server_info`; `sessions` and `spans` where the engine itself has shown them, which outranks its version."""
    version = str(about.get("version") or "")
    number = _number(version)
    embedded = version == EMBEDDED
    return Dialect(
        version=version,
        sessions=sessions if sessions is not None else number >= _SESSIONS_SINCE,
        spans=spans if spans is not None else embedded or number >= _SPANS_SINCE,
        prefix_cache=about.get("disable_radix_cache", embedded) is not True,
        overlap=about.get("disable_overlap_schedule", embedded) is not True,
        ranks=_count(about.get("tp_size")),
        replicas=_count(about.get("dp_size")),
        stages=_count(about.get("pp_size")),
        halves=about.get("halves") is True,
    )


def ended_by_updates(about: Mapping[str, Any]) -> str | None:
    """From `/server_info`: why no version can be brought to it, however it is brought.

    >>> ended_by_updates({"version": "0.5.17", "speculative_algorithm": "NGRAM"})
    'runs SGLang 0.5.17 with speculative_algorithm NGRAM, and its first update would end it: take 0.5.23 or newer, or leave that out'
    """
    version = str(about.get("version") or "")
    for name, value in _ENDED_BY_UPDATES.items():
        if about.get(name) == value and () < _number(version) < _WHOLE_SINCE:
            return f"runs SGLang {version} with {name} {value}, and its first update would end it: take 0.5.23 or newer, or leave that out"
    return None


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 1


def _number(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
