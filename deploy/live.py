"""The live view of a run: reward, staleness, buffer, versions, rates, who waits for whom.

One look and one drawing a second; plain lines where there is no terminal.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from redis.exceptions import RedisError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.snapshot import Picture, PictureSource
from deploy.tally import WINDOW_STEPS
from deploy.trouble import channel, in_short, rests, troubles
from deploy.up.supervisor import Child, Life, Phase
from protocol.errors import RollstreamError
from protocol.messages import EngineState, EngineStatus, Event
from protocol.versions import Version

_REFRESH_S = 1.0
_PLAIN_S = 5.0
_BARS = "▁▂▃▄▅▆▇█"
_NOISE = frozenset({"boot_nonce", "incarnation_id", "digest"})
"""Fields that tell a person nothing."""
_WIDTH = 40


class Processes(Protocol):
    """What the view shows of the launcher."""

    @property
    def lives(self) -> Mapping[Child, Life]: ...
    @property
    def notes(self) -> Sequence[tuple[float, str]]: ...


async def show(source: PictureSource, processes: Processes, *, live: bool, last_step: int = 0) -> None:
    """Show the run for ever; cancelled at its end. `live`: on a terminal that is ours alone. `last_step`: where it is to end; 0: not by steps."""
    if live:
        await _show_live(source, processes, last_step)
    else:
        await _show_lines(source, last_step)


async def _show_live(source: PictureSource, processes: Processes, last_step: int) -> None:
    picture: Picture | None = None
    trouble = ""
    with Live(Text("starting …"), console=Console(), auto_refresh=False, transient=False) as view:
        while True:
            try:
                picture, trouble = await source.picture(), ""
            except (RollstreamError, RedisError, OSError) as problem:
                trouble = f"Redis does not answer: {problem}"
            view.update(render(picture, processes.lives, list(processes.notes), trouble, last_step=last_step), refresh=True)
            await asyncio.sleep(_REFRESH_S)


async def _show_lines(source: PictureSource, last_step: int) -> None:
    """One line every few seconds, when something moved."""
    shown = ""
    while True:
        try:
            text = line(await source.picture(), last_step=last_step)
        except (RollstreamError, RedisError, OSError) as problem:
            text = f"Redis does not answer: {problem}"
        if text != shown:
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            sys.stdout.flush()
            shown = text
        await asyncio.sleep(_PLAIN_S)


def line(picture: Picture, *, last_step: int = 0) -> str:
    """A run in one line: step, reward, staleness, buffer, rate, versions, who waits, what fails, which engines are in trouble."""
    ledger = picture.ledger
    if ledger is None:
        return "  ".join(("waiting for the trainer to create the run", *stalled(picture)))
    staleness = picture.recent_staleness
    engines = " ".join(str(engine.version) if engine.state is EngineState.ROUTABLE else engine.state.value for engine in picture.engines) or "none"
    waits = ", ".join(f"{who} {edge} {seconds:.0f}s" for who, edge, seconds in waiting(picture))
    parts = [
        f"step {_step(ledger.trained, last_step)}",
        f"reward {'-' if picture.reward is None else f'{picture.reward:.3f}'}",
        f"staleness {staleness.mean:.2f} (p99 {staleness.p99}, max {staleness.max})",
        f"buffer {ledger.generating} generating {ledger.ready} ready {ledger.leased} leased of {ledger.admission_limit}",
        f"{_rate(picture)} tokens/s",
        f"engines {engines}",
        *([f"waiting: {waits}"] if waits else []),
        *([failed] if (failed := failures(picture)) else []),
        *([f"trouble: {short}"] if (short := in_short(picture)) else []),
        *(["draining"] if ledger.state.value == "draining" else []),
        *stalled(picture),
    ]
    return "  ".join(parts)


def waiting(picture: Picture) -> list[tuple[str, str, float]]:
    """Who waits, for what, and for how many seconds."""
    members = [
        *((status.producer_id, status.waiting_for, status.waiting_since) for status in picture.producers),
        *(("trainer", status.waiting_for, status.waiting_since) for status in picture.trainers),
    ]
    return [(who, edge.value, max(0.0, picture.at - since)) for who, edge, since in members if edge is not None]


def stalled(picture: Picture) -> list[str]:
    """What has held the run up for too long, with its reason and what to do."""
    return [f"STALLED {stall.sentence(picture.at)}" for stall in picture.stalls]


def failures(picture: Picture) -> str:
    """Groups that the producers gave up on, and who can say why; empty if there is none."""
    failing = [status for status in picture.producers if status.groups_failed]
    if not failing:
        return ""
    failed, again = (sum(counts) for counts in zip(*((status.groups_failed, status.samples_retried) for status in failing), strict=True))
    return f"{failed} groups failed, {again} samples asked again (why: log of {', '.join(status.producer_id for status in failing[:3])})"


def _step(trained: int, last_step: int) -> str:
    return f"{trained} of {last_step}" if last_step else str(trained)


def _rate(picture: Picture) -> str:
    return "-" if picture.tokens_per_s is None else f"{picture.tokens_per_s:.0f}"


def render(
    picture: Picture | None, lives: Mapping[Child, Life], notes: Sequence[tuple[float, str]], trouble: str = "", *, last_step: int = 0
) -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    parts += [Text(sentence, style="bold red") for sentence in (stalled(picture) if picture is not None else ())]
    if picture is None or picture.ledger is None:
        parts.append(Text("waiting for the trainer to create the run", style="yellow"))
    else:
        parts += [_progress(picture, last_step), _members(picture)]
    parts += [_processes(lives), _happenings(picture, notes)]
    return Panel(Group(*parts), title=f"rollstream  {picture.run if picture else ''}  (version = incarnation:step)", title_align="left", border_style="dim")


def _progress(picture: Picture, last_step: int) -> RenderableType:
    ledger = picture.ledger
    assert ledger is not None
    now, all_of_it, totals = picture.recent_staleness, picture.staleness, picture.totals
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=9)
    table.add_column()
    rewards = [point.reward for point in picture.steps]
    shown = "-" if picture.reward is None else f"{picture.reward:.3f}"
    table.add_row("step", f"{_step(ledger.trained, last_step)}  incarnation {ledger.incarnation}  {ledger.state.value}")
    table.add_row("reward", Text.assemble((shown, "bold green"), f"  mean of {WINDOW_STEPS} steps  ", (sparkline(_means(rewards)), "green")))
    if totals.evaluation:
        table.add_row("held out", f"exact {float(totals.evaluation.get('exact', 0.0)):.3f}  ({totals.evaluation.get('phase', '')})")
    table.add_row("staleness", f"mean {now.mean:.2f}  p99 {now.p99}  max {now.max}   whole run: mean {all_of_it.mean:.2f}  max {all_of_it.max} steps")
    waiting_bytes = f"{_bytes(ledger.bytes_used)} of {_bytes(ledger.byte_budget)}"
    table.add_row(
        "buffer",
        Text.assemble(
            _bar(ledger.generating, ledger.ready, ledger.leased, ledger.admission_limit),
            f"  {ledger.generating} generating  {ledger.ready} ready  {ledger.leased} leased  of {ledger.admission_limit}   {waiting_bytes}",
        ),
    )
    table.add_row("rate", f"{_rate(picture)} tokens/s generated   {_steps_per_minute(picture)} steps/min   {totals.published} versions published")
    waits = waiting(picture)
    table.add_row("waiting", ",  ".join(f"{who}: {edge} for {seconds:.0f} s" for who, edge, seconds in waits) if waits else "nobody")
    if failed := failures(picture):
        table.add_row("failing", Text(failed, style="yellow"))
    return table


def _members(picture: Picture) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("engine", "state", "version", "by", "lag", "running", "queued", "busy", "updates"):
        table.add_column(title, justify="left" if title in ("engine", "state", "version", "by") else "right")
    for engine in picture.engines:
        lag = picture.lag(engine.version)
        busy = f"{100 * engine.busy_s / engine.uptime_s:.0f}%" if engine.uptime_s else "-"
        table.add_row(
            engine.engine_id,
            _state(engine),
            str(engine.version or "-"),
            engine.transport or "-",
            "-" if lag is None else str(lag),
            f"{engine.running}/{engine.capacity}",
            str(engine.queued),
            busy,
            str(engine.updates),
        )
    wrong = [*(trouble.sentence for trouble in troubles(picture)), *channel(picture), *rests(picture)]
    return Group(table, *(Text(told, style="yellow") for told in wrong), *(Text(told, style="dim") for told in carriers(picture)))


def carriers(picture: Picture) -> list[str]:
    """Who moves versions between the store and the engines, and how far each is."""
    told = [
        f"weight server {one.server_id} on {one.device} by {one.backend}: {one.staged or 'nothing'} staged, {one.groups} engines, {_bytes(one.sent_bytes)} sent"
        for one in picture.weight_servers
    ]
    told += [
        f"relay {one.relay_id}: {one.version or 'nothing'} whole{_behind(picture, one.version)}, {one.deltas} from deltas, {one.fulls} fetched whole, "
        f"{_bytes(one.fetched_bytes)} read"
        for one in picture.relays
    ]
    if picture.changed_share is not None and picture.newest is not None:
        told.append(f"newest {picture.newest.version}: {100 * picture.changed_share:.2f} % of its elements changed, {_bytes(picture.newest.total_bytes)}")
    return told


def _behind(picture: Picture, version: Version | None) -> str:
    """How far a carrier is behind the newest published version; ordinary for as long as a copy takes."""
    newest = None if picture.newest is None else picture.lag(picture.newest.version)
    lag = picture.lag(version)
    if lag is None or newest is None or lag <= newest:
        return ""
    steps = lag - newest
    return f" ({steps} step{'' if steps == 1 else 's'} behind the newest)"


def _state(engine: EngineStatus) -> Text:
    style = {EngineState.ROUTABLE: "green", EngineState.STARTING: "yellow", EngineState.UNFIT: "bold red", EngineState.LEAVING: "dim"}[engine.state]
    return Text(engine.state.value + (f" ({engine.reason[:40]})" if engine.reason else ""), style=style)


def _processes(lives: Mapping[Child, Life]) -> RenderableType:
    text = Text("processes  ", style="dim")
    style = {Phase.RUNNING: "green", Phase.WAITING: "bold yellow", Phase.STOPPING: "yellow", Phase.DONE: "dim"}
    for child, life in lives.items():
        if not (life.wanted or life.alive):
            continue
        restarts = f" ↻{life.restarts}" if life.restarts else ""
        text.append(f"{child}{restarts}  ", style=style[life.phase])
    return text


def _happenings(picture: Picture | None, notes: Sequence[tuple[float, str]]) -> RenderableType:
    found = [(event.at, describe(event)) for event in (picture.events if picture else ())] + list(notes)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=8)
    table.add_column(no_wrap=True)
    for at, text in sorted(found)[-6:]:
        table.add_row(time.strftime("%H:%M:%S", time.localtime(at)), text)
    return table


def describe(event: Event) -> str:
    """An audit event for people."""
    told = {name: value for name, value in event.fields.items() if isinstance(value, str | int | float) and not isinstance(value, bool) and name not in _NOISE}
    shown = ", ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in told.items())
    return f"{event.op.replace('_', ' ')}: {shown}"[:110]


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """A row of bars, lowest to highest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    if len(values) > width:
        values = [values[int(index * (len(values) - 1) / (width - 1))] for index in range(width)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _means(values: Sequence[float]) -> list[float]:
    """Running means over the window."""
    means: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - WINDOW_STEPS] if index >= WINDOW_STEPS else 0.0)
        means.append(total / min(index + 1, WINDOW_STEPS))
    return means


def _bar(generating: int, ready: int, leased: int, limit: int, width: int = 20) -> Text:
    bar = Text()
    for count, style in ((leased, "blue"), (ready, "green"), (generating, "yellow")):
        bar.append("█" * round(width * count / max(1, limit)), style=style)
    return bar + Text("·" * max(0, width - len(bar)), style="dim")


def _steps_per_minute(picture: Picture) -> str:
    recent = picture.steps[-WINDOW_STEPS:]
    if len(recent) < 2 or recent[-1].at <= recent[0].at:
        return "-"
    return f"{60 * (len(recent) - 1) / (recent[-1].at - recent[0].at):.0f}"


def _bytes(count: int) -> str:
    """For people.

    >>> _bytes(512), _bytes(3 << 20)
    ('512 B', '3.0 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
