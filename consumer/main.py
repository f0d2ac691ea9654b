"""The `rl-trainer` command: everything that can be refused is refused here, before torch is imported and before anything is written."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from buffer.config import BufferConfig
from buffer.durability import Durability
from buffer.redis_ledger import RedisLedger
from buffer.shares import check_enough, enough_for
from consumer.allocator import keep_freed_memory
from consumer.config import TrainerDaemonConfig, check_ranks, check_sections, replicas
from consumer.daemon import run_trainer
from consumer.modes import RunHandle, run_recorded, run_shadow
from consumer.ranks.children import Children, StartOthers, die_with_rank_0
from consumer.ranks.place import LOCAL, Place, own_place, place_of
from protocol.config import load
from protocol.connection import check_server, connect
from protocol.daemon import arguments, ignore, run_daemon
from protocol.errors import ConfigError, IdentityMismatch, RunExists, RunMissing
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys

_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("rl-trainer", "Trains on the groups of a run, publishes every version, writes checkpoints.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--new", action="store_true", help="make the run; refuses one that exists")
    how.add_argument("--resume", action="store_true", help="go on from the newest registered checkpoint, or from the starting weights if there is none")
    how.add_argument("--shadow", metavar="NAME", help="train beside the run's trainer on the same groups, taking none; writes shadow-NAME/ in run.dir")
    how.add_argument("--recorded", metavar="WHERE", help="train on a recording or export: no Redis, producer or engine; writes recorded/ in run.dir")
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="with --resume: go back to the registered checkpoint of step N, newer ones are given up; with --shadow: begin at it, not at the starting weights",
    )
    parser.add_argument(
        "--abandon",
        action="store_true",
        help="with --resume --from-step N: generate anew what followed step N instead of training it again; N may be any checkpoint still on disk, or 0",
    )
    options = parser.parse_args(argv)
    if options.from_step is not None and not (options.resume or options.shadow):
        parser.error("--from-step goes with --resume or --shadow")
    if options.abandon and not (options.resume and options.from_step is not None):
        parser.error("--abandon goes with --resume --from-step N")
    ignore(signal.SIGUSR1)  # rank 0 hears it while it trains; batch systems send it to every rank
    die_with_rank_0()
    keep_freed_memory()
    rank = os.environ.get("RANK", "0")
    return run_daemon("rl-trainer" if rank == "0" else f"rl-trainer rank {rank}", lambda stop: train(options, stop))


async def train(options: argparse.Namespace, stop: asyncio.Event, *, address: str = LOCAL, start_others: StartOthers | None = None) -> None:
    """Check, then hand over to `consumer.daemon`, on ranks above 0 to `consumer.ranks.follower`, or to `consumer.modes` for what takes nothing from a run.

    Ranks that nobody has started are started by `start_others`, and meet at `address`, which is this host's; without, they are processes of this host.
    Raises: `ConfigError`, `RedisUnavailable`.
    """
    config = load(TrainerDaemonConfig, options.config, sets=options.set)
    place = _place(config, address, alone=options.recorded is not None or options.shadow is not None)
    if options.recorded is not None:
        await run_recorded(config, options.recorded, stop)
        return
    config.check()
    if not config.redis.url:
        raise ConfigError(
            "redis.url is empty: give the URL of the run's Redis, such as --set redis.url=unix:///run/redis.sock; the one that `rollstream up` started is "
            f"redis_url in {config.run.folder / 'processes.json'}"
        )
    shares = None
    if place is not None:
        shares = replicas(config.megatron, config.trainer, place.ranks)
        if options.new:
            config = config.model_copy(update={"buffer": enough_for(config.buffer, shares or place.ranks)})
            check_enough(config.buffer, shares or 1, made=False)
    if place is not None and place.rank:
        from consumer.ranks.follower import follow  # torch

        await follow(config, place)
        return
    keys = Keys(config.run.name)
    identity = identify(config.run, config.model, config.data, config.rollout)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        facts = await check_server(client, url=config.redis.url)
        _LOG.info("Redis %s: %s", facts.version, facts.durability)
        ledger = RedisLedger(client, keys, durable=Durability(client, keys, facts, replicas=config.redis.replicas_acked))
        of_run = config.buffer
        if options.new:
            await _refuse_existing(ledger, identity, config)
        else:
            of_run = await ledger.join(identity)
            _tell_settings(of_run, config.buffer)
            if options.shadow is not None:
                run = RunHandle(client=client, keys=keys, ledger=ledger, settings=of_run)
                await run_shadow(config, run, stop, name=options.shadow, from_step=options.from_step)
                return
            check_enough(of_run, shares or 1, made=True)
            check_sections(buffer=of_run, weights=config.weights, rollout=config.rollout, checkpoint=config.checkpoint, loss=config.loss)
        new_as = identity if options.new else None
        arguments = ["-c", options.config, *(part for item in options.set for part in ("--set", item)), "--resume"]
        back = {"from_step": options.from_step, "abandon": options.abandon}
        start = start_others or functools.partial(Children, arguments)
        await run_trainer(config, ledger, client, keys, stop, new_as=new_as, settings=of_run, place=place, start_others=start, **back)
    finally:
        await client.aclose()


def _place(config: TrainerDaemonConfig, address: str, *, alone: bool) -> Place | None:
    """None: one process is the trainer. Raises: `ConfigError` for what several ranks cannot do."""
    found = place_of(os.environ, config.trainer.ranks)
    if alone:
        if found is not None:
            raise ConfigError(f"--shadow and --recorded train in one process, and {found.ranks} were started (WORLD_SIZE): start one")
        return None
    if found is None and config.trainer.ranks > 1:
        found = own_place(config.trainer.ranks, address)
    if found is not None:
        check_ranks(config.placement, found.ranks)
    return found


async def _refuse_existing(ledger: RedisLedger, identity: RunIdentity, config: TrainerDaemonConfig) -> None:
    """Raises: `RunExists` for a run in Redis, or a folder that holds another run's record."""
    try:
        await ledger.join(identity)
    except RunMissing:
        pass
    except IdentityMismatch as problem:
        raise RunExists(f"run {config.run.name!r} exists already, with other settings; use another run.name") from problem
    else:
        raise RunExists(f"run {config.run.name!r} exists already: use --resume to go on with it, or another run.name")
    if (left := await asyncio.to_thread(_earlier_record, config)) is not None:
        raise RunExists(f"{left} is of an earlier run: use another run.dir, or move it away")


def _earlier_record(config: TrainerDaemonConfig) -> Path | None:
    """What an earlier run left in the folders that this one would write."""
    records = [config.run.folder / name for name in ("witness.jsonl", "audit.jsonl", "metrics.jsonl")]
    checkpoints = sorted(config.checkpoint_folder.glob("step-*")) if config.checkpoint_folder.is_dir() else []
    return next((path for path in (*records, *checkpoints) if path.is_dir() or (path.is_file() and path.stat().st_size)), None)


def _tell_settings(of_run: BufferConfig, here: BufferConfig) -> None:
    differ = [name for name in BufferConfig.model_fields if getattr(of_run, name) != getattr(here, name)]
    if not here.chunk_groups and "chunk_groups" in differ:  # whatever the run's ranks needed
        differ.remove("chunk_groups")
    if differ:
        _LOG.warning("[buffer] settings were fixed when the run was made; those of this file are not used: %s", ", ".join(differ))


if __name__ == "__main__":
    raise SystemExit(main())
