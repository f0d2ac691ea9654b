"""`rollstream bias`: what became of every sampled token of a run, live or ended, by the length of its rollout and by its age."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rich.table import Table

from buffer.audit import read_audit
from buffer.bias import read_bias
from buffer.report import surviving
from buffer.witness import read_witness
from deploy.config import ReaderConfig, reader_url
from deploy.http import bodies
from protocol.connection import connect
from protocol.errors import ConfigError, RedisUnavailable
from protocol.keys import Keys
from protocol.messages import Event

_LOG = logging.getLogger(__name__)


async def bias_by_hand(config: ReaderConfig) -> bodies.Bias:
    """From the run's record, and what Redis still holds of the audit if it answers.

    Raises: `ConfigError` if the record is not here.
    """
    folder = config.run.folder
    if not (folder / "audit.jsonl").is_file():
        raise ConfigError(f"run.dir {folder} has no audit.jsonl: ask where the trainer runs, or correct run.name or run.dir")
    events = await _events(config)
    found = bodies.bias(read_bias(events))
    witnessed = sum(line.tokens for line in surviving(read_witness(folder / "witness.jsonl"), events))
    if witnessed != found.total.trained:
        _LOG.warning(
            "the witness file has %d trained tokens, the audit %d: a step is on its way from one to the other, or one is damaged",
            witnessed,
            found.total.trained,
        )
    return found


async def _events(config: ReaderConfig) -> list[Event]:
    path = config.run.folder / "audit.jsonl"
    try:
        url = reader_url(config.run, config.redis)
    except ConfigError:  # the run has ended, and its server with it: the file has everything
        return await read_audit(path)
    client = connect(url, deadline_s=1.0)
    try:
        return await read_audit(path, client, Keys(config.run.name))
    except RedisUnavailable as problem:
        _LOG.warning("from %s alone, without what Redis may still hold: %s", path, problem)
        return await read_audit(path)
    finally:
        await client.aclose()


def tables(found: bodies.Bias) -> list[Table | str]:
    """For people: a row a bucket, and the total."""
    reasons = list(found.total.dropped)
    shown: list[Table | str] = [
        _table("tokens by length of their rollout, up to", found.lengths, found.total, reasons, share=True),
        _table("tokens by age: steps behind the newest trained, when stored / dropped / trained", found.ages, found.total, reasons, share=False),
        "groups dropped: " + (", ".join(f"{count} {reason}" for reason, count in found.dropped_groups.items()) or "none"),
    ]
    if found.unaccounted_tokens:
        shown.append(f"{found.unaccounted_tokens} tokens are not accounted for: a part of the record is missing")
    return shown


def _table(title: str, flows: Mapping[str, bodies.Flow], total: bodies.Flow, reasons: list[str], *, share: bool) -> Table:
    """`share` of what was generated; not by age, as a token is generated at one and trained at another."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), header_style="bold")
    for name in ("", "generated", *(f"dropped {reason}" for reason in reasons), "masked", "outstanding", "trained", *(("share trained",) if share else ())):
        table.add_column(name, justify="right")
    for name, flow in (*flows.items(), ("all", total)):
        part = "-" if flow.trained_share is None else f"{100 * flow.trained_share:.1f}%"
        dropped = [str(flow.dropped.get(reason, 0)) for reason in reasons]
        table.add_row(name, str(flow.generated), *dropped, str(flow.masked), str(flow.outstanding), str(flow.trained), *((part,) if share else ()))
    return table
