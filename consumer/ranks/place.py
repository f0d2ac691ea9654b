"""Which rank of a trainer this process is, and where it meets the others. Imports no torch.

By the four variables that torchrun, a Kubernetes training operator and most batch systems set for each process; rank 0 sets them for the ranks it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from buffer.shares import Share
from protocol.errors import ConfigError

LOCAL = "127.0.0.1"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of several. Rank 0 leads: it alone speaks to the ledger."""

    rank: int
    ranks: int
    local_rank: int
    """Among those of its host: which of the host's devices is its own."""
    host: str
    port: int
    """Where the store is that all meet at."""
    own_store: bool = False
    """Rank 0 made that store for ranks it started; otherwise whoever started all of them did, or rank 0 does."""

    @property
    def share(self) -> Share:
        return Share(self.rank, self.ranks)

    @property
    def listen_at(self) -> str:
        """The address of rank 0's channel; "": any."""
        return LOCAL if self.host in (LOCAL, "localhost") else ""

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank of this host is started with."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }

    def at(self, port: int) -> Place:
        return dataclasses.replace(self, port=port)


def place_of(environ: Mapping[str, str], ranks: int) -> Place | None:
    """Where somebody put this process; None if it was started by itself. `ranks` is `trainer.ranks`. Raises: `ConfigError` where the two do not agree."""
    there = [name for name in _VARIABLES if environ.get(name)]
    if "RANK" not in there or "WORLD_SIZE" not in there:
        return None
    if missing := [name for name in _VARIABLES if name not in there]:
        raise ConfigError(f"RANK is set, but not {', '.join(missing)}: start with torchrun, or unset RANK and WORLD_SIZE and set trainer.ranks")
    try:
        rank, world, port = int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["MASTER_PORT"])
        local = int(environ.get("LOCAL_RANK", "0"))
    except ValueError as problem:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be numbers ({problem})") from problem
    if not (0 <= rank < world and local >= 0 and 0 < port < 1 << 16):
        raise ConfigError(f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local} MASTER_PORT={port}: expected 0 <= RANK < WORLD_SIZE and a port")
    if ranks not in (1, world):
        raise ConfigError(f"trainer.ranks {ranks}, but {world} processes were started (WORLD_SIZE): set one of them to the other, or trainer.ranks = 1")
    if world == 1:
        return None
    return Place(rank=rank, ranks=world, local_rank=local, host=environ["MASTER_ADDR"], port=port)


def own_place(ranks: int, address: str = LOCAL) -> Place:
    """Of rank 0 where it starts the others itself, who reach it at `address`. The port is known once the store is there."""
    return Place(rank=0, ranks=ranks, local_rank=0, host=address, port=0, own_store=True)
