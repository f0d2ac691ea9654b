"""The name of every Redis key of a run, in one place.

Small state shares the hash tag `{run}`, so a script may touch several keys and stay legal on Redis Cluster. Payload keys carry no common tag: they spread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from protocol.errors import ConfigError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run.

    Raises: `ConfigError` for a run name that could not be a key and a folder name.
    """

    run: str

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigError(f"run.name {self.run!r}: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit")

    def key(self, suffix: str) -> str:
        """A key in the run's own slot."""
        return f"rs:{{{self.run}}}:{suffix}"

    # buffer
    @property
    def state(self) -> str:
        """Hash: identity, settings, counters and clocks of the ledger."""
        return self.key("state")

    @property
    def forks(self) -> str:
        """Hash: incarnation → "parent:step:random id"."""
        return self.key("forks")

    @property
    def audit(self) -> str:
        """Stream: every state change of the run, see `buffer/README.md`."""
        return self.key("audit")

    # weightsync
    @property
    def engines(self) -> str:
        """Hash: engine id → encoded `EngineStatus`."""
        return self.key("engines")

    @property
    def routable(self) -> str:
        """Hash: engine id → "incarnation:n:expires_ms" by the clock of Redis. Read by the reserve script."""
        return self.key("routable")

    @property
    def weights(self) -> str:
        """Hash: the weight pointer and manifests."""
        return self.key("weights")

    @property
    def engine_facts(self) -> str:
        """Hash: engine id → JSON of what the registry itself knows: boot, state, version, target, reason, expiry."""
        return self.key("engines:facts")

    @property
    def weight_pins(self) -> str:
        """Hash: holder → "incarnation:n:expires_ms"; what garbage collection must leave alone."""
        return self.key("weights:pins")

    @property
    def reconcilers(self) -> str:
        """Hash: engine id → "boot|owner|expires_ms", the lock of the one reconciler of an engine."""
        return self.key("weights:reconcilers")

    @property
    def pauses(self) -> str:
        """Hash: which engines may be paused now, and who waits for it."""
        return self.key("weights:pauses")

    @property
    def turn(self) -> str:
        """Hash: whose turn it is on shared devices, and how many turns there were."""
        return self.key("turn")

    @property
    def holders(self) -> str:
        """Hash: "role:id" → "boot|expires_ms": whose memory lies on shared devices."""
        return self.key("turn:holders")

    @property
    def eval_aim(self) -> str:
        """String: the version that the engines of the evaluation's own are asked to serve."""
        return self.key("eval:aim")

    @property
    def placement(self) -> str:
        """Hash: the placement group of a run on Ray, and which of its bundles each actor has."""
        return self.key("placement")

    @property
    def wishes(self) -> str:
        """Hash: how many producers and engines somebody wishes of the `rollstream up` of this machine, and how often one was wished for."""
        return self.key("wishes")

    # presence of producers and trainers
    def presence(self, role: str) -> str:
        """Hash: member id → encoded status; its expiry lies in `presence_deadline`."""
        return self.key(f"presence:{role}")

    def presence_deadline(self, role: str) -> str:
        """Sorted set: member id by expiry in milliseconds of the clock of Redis."""
        return self.key(f"presence:{role}:deadline")

    def presence_seen(self, role: str) -> str:
        """Milliseconds of the clock of Redis: when any member of the role was last heard of."""
        return self.key(f"presence:{role}:seen")

    # wake-ups
    @property
    def wakeups(self) -> str:
        """Publish/subscribe channel; a message is a topic, see `protocol.wakeups.Topic`."""
        return self.key("wakeups")

    # payloads
    def payload(self, seq: int, attempt: int, token: str) -> str:
        """Written once by the owner of the slot; in a slot of its own, to spread over a cluster."""
        return f"rs:payload:{self.run}:{seq}:{attempt}:{token}"
