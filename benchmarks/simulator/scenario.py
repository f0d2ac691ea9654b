"""Everything about a simulated run that its seed decides, but for what happens in it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from buffer.config import BufferConfig
from buffer.ledger_state import Rules

MAX_BYTES = 64
"""Upper bound of a group's payload, charged at reserve."""
KEEP = 2
"""Checkpoints."""

CLIENT_RULES = {
    "request_id_reused": "S1: a reserve that is asked again carries the same request id",
    "names_what_it_holds": "S2: a heartbeat names what the process holds now, nothing else",
    "verify_payload": "P2: a payload is compared with its header before it is trained",
    "lost_is_reported": "P2: a payload that is gone is reported, not passed over",
    "resume_registered": "T5: a trainer resumes from the newest registered checkpoint, not from the newest folder",
    "witness_first": "R3: the witness line is on the disk before the ledger hears of the step",
    "pointer_after_trained": "T4: a version is published after its step is trained",
    "publish_fencing": "T1: publish carries the incarnation",
    "incarnation_order": "V3: the pointer is ordered by incarnation first",
    "lineage_compare": "S3: engines are compared with a slot by lineage, not by number",
    "answers_outrank": "W3: the version in an answer outranks the registry",
    "boot_nonce": "W3: registration and acks are bound to one boot",
    "reconciler_lock": "W1: one reconciler an engine",
    "take_over": "W1: a reconciler that takes an engine over takes it off the routes until the newest is applied in full",
    "unknown_after_failure": "W1: after a failed update nobody knows what the engine holds",
    "pause_limit": "W8: so many engines may be paused at once",
    "idle_off_routes": "W8: an idle engine is let through only off the routes, where nobody asks it before it is paused, or under the pause",
    "pause_in_time": "W1: a right to pause that ran out before it was used is asked for again",
    "lets_go_its_own": "W1: whoever hung past its lock does not let an engine go on that another has",
    "version_floor": "V3: an engine never goes back within an incarnation",
    "acks_forward": "V3: the registry refuses an older ack",
    "pins": "W5: what an engine serves or applies is not deleted",
    "pins_what_it_applies": "W5: what an engine is paused for is pinned by its own name, whatever a late look goes for",
    "own_leftovers": "T1: a trainer that was replaced deletes no version of its successor",
    "pointer_again": "R1: a pointer that fell back is published again",
    "acks_again": "R1: an ack that the registry forgot is made again",
    "resume_ahead": "R1: a trainer that comes back knows by its disk that the ledger lost writes",
    "incarnation_above": "R1: a new incarnation is greater than any that was seen",
    "seen": "R1: a trainer presents the sequence of its last acknowledged call",
}
"""Rules that processes, or the modelled weight channel, keep."""
LEDGER_RULES = tuple(one.name for one in fields(Rules))
REDUNDANT = {
    "publish_fencing": "the pointer's order by incarnation, and that it names trained steps only, refuse what a replaced trainer publishes",
    "acks_forward": "an older ack only makes an engine look older than it is, and `acks_again` mends that",
    "unknown_after_failure": "the registry calls the engine unfit, and what is unfit is updated in full",
}
"""Second locks: no harm was found without them, for the reason given."""
ALL_RULES = frozenset(CLIENT_RULES) | frozenset(LEDGER_RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    settings: BufferConfig
    producers: int
    engines: int
    inflight: int
    checkpoint_every: int
    publish_every: int
    keep_versions: int
    max_paused: int
    exact: bool
    """A replay computes the same weights."""
    binds: bool
    """The source is not pure: prompts are bound to groups."""
    mean_s: float
    """Of a sample, when the engine is not paused."""
    sigma: float
    train_s: float
    """Of a chunk."""
    apply_s: float
    fail_rate: float
    filter_rate: float
    regresses: bool
    waits: bool
    """attach and checkpoint are answered once a replica or the disk has them."""

    @classmethod
    def of(cls, seed: int, changes: Mapping[str, object] | None = None, settings: Mapping[str, object] | None = None) -> Scenario:
        """`changes` to what the seed decides, and to the buffer's `settings`."""
        pick = random.Random(f"{seed}/scenario")
        depth = pick.choice([0.0, 0.0, 0.5, 1.0, 1.5, 3.0])
        groups = pick.choice([1, 2, 3, 4, 6])
        checkpoint_every = pick.choice([1, 2, 3])
        bound = pick.choice([1, 2, 3, 8])
        publish_every = 1 if depth == 0 else pick.choice([1, 1, min(2, bound + 1)])
        retention = pick.choice([0, 0, 1, 3])
        base = {
            "groups_per_step": groups,
            "chunk_groups": pick.randint(1, groups),
            "pipeline_depth": depth,
            "max_staleness": bound,
            "staleness_guard": pick.choice(["mask", "mask", "drop", "correct"]),
            "min_kept_share": pick.choice([0.0, 0.5, 0.9]),
            "selection": pick.choice(["oldest", "oldest", "freshest", "fifo"]),
            "retention": retention,
            "slot_seconds": pick.choice([4.0, 6.0]),
            "max_attempts": pick.choice([3, 50]),
            "byte_budget": 1 << 20,
            "spill": pick.choice(["", "", "", "memory://"]),
            "retention_bytes": pick.choice([0, 0, 200]),
            "retention_seconds": pick.choice([0.0, 0.0, 3.0]),
        } | dict(settings or {})
        least = BufferConfig.model_validate(base).least_byte_budget(group_bytes=MAX_BYTES, checkpoints_kept=KEEP, checkpoint_steps=checkpoint_every)
        base["byte_budget"] = least if pick.random() < 0.5 else least * 4
        decided = cls(
            settings=BufferConfig.model_validate(base),
            producers=pick.choice([1, 2, 2, 3]),
            engines=pick.choice([1, 2, 2, 3]),
            inflight=pick.choice([1, 3, 8]),
            checkpoint_every=checkpoint_every,
            publish_every=publish_every,
            keep_versions=pick.choice([1, 2]),
            max_paused=pick.choice([1, 1, 2]),
            exact=pick.random() < 0.7,
            binds=pick.random() < 0.3,
            mean_s=pick.choice([0.2, 0.5, 1.0]),
            sigma=pick.choice([0.3, 1.0]),
            train_s=pick.choice([0.02, 0.1, 0.3]),
            apply_s=pick.choice([0.02, 0.2]),
            fail_rate=pick.choice([0.0, 0.03]),
            filter_rate=pick.choice([0.0, 0.05]),
            regresses=pick.random() < 0.4,
            waits=pick.random() < 0.5,
        )
        return replace(decided, **dict(changes or {}))  # type: ignore[arg-type]


def describe(seed: int) -> str:
    """One line for people."""
    scenario = Scenario.of(seed)
    settings = scenario.settings.model_dump(mode="json", exclude_defaults=True)
    own = {one.name: getattr(scenario, one.name) for one in fields(scenario) if one.name != "settings"}
    return " ".join(f"{name}={value}" for name, value in (settings | own).items())
