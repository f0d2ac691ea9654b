"""Bodies of the HTTP service. Units are in the names; staleness and lag are in steps."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from buffer import bias as bias_report
from deploy import trouble
from deploy.snapshot import Picture
from deploy.tally import Distribution
from protocol.codec import to_json
from protocol.messages import EngineStatus


class Body(BaseModel):
    model_config = ConfigDict(frozen=True)


class Problem(Body):
    """What every answer but a good one holds."""

    error: str
    what_to_do: str


class Spread(Body):
    """A histogram and its figures; percentiles by nearest rank."""

    count: int = Field(description="Weight of everything counted, such as tokens.")
    mean: float
    p50: int
    p99: int
    max: int
    histogram: dict[str, int]

    @classmethod
    def of(cls, found: Distribution) -> Spread:
        return cls(
            count=found.count,
            mean=found.mean,
            p50=found.p50,
            p99=found.p99,
            max=found.max,
            histogram={str(value): count for value, count in found.histogram.items()},
        )


class EngineLag(Body):
    engine_id: str
    version: str | None
    lag_steps: int | None = Field(description="Newest trained step minus the engine's; null: it serves no version of this run.")


class EngineWeights(EngineLag):
    state: str
    target: str | None = Field(description="Version that it prepares or applies.")
    transport: str = Field(description="What brought the version that it serves; another than weights.transport: that way broke.")
    updates: int
    paused_s: float
    trouble: str = Field(description="What keeps it from the newest version; empty: all is well.")


class Staleness(Body):
    trained: int = Field(description="Steps trained.")
    complete: bool = Field(description="False: totals count from what was left of the audit when this service began.")
    total: Spread = Field(description="Staleness of every token that entered a loss, weighted by tokens.")
    recent: Spread = Field(description="The same over the last 20 steps.")
    ready: Spread = Field(description="Trainable tokens that are READY, by the staleness they would have in the next step.")
    publish_lag: Spread = Field(description="Of stored tokens, judged when their group was put.")
    masked_tokens: int = Field(description="Tokens over K that the guard took out of losses.")
    engines: list[EngineLag]


class Buffer(Body):
    state: str
    incarnation: int
    trained: int
    next_seq: int
    low_seq: int
    generating: int
    ready: int
    leased: int
    released: int
    outstanding: int
    admission_limit: int
    trained_groups: int
    dead: dict[str, int]
    releases: dict[str, int]
    bytes_used: int
    byte_budget: int
    checkpoints: list[dict[str, object]]
    selection: str = Field(description="Which ready groups a step takes first: oldest, freshest or fifo.")
    letters: int = Field(description="Groups that were set aside; see `rollstream letters list`.")
    to_spill: int = Field(description="Trained steps that wait to be spilled.")
    spill_problem: str = Field(description="Why they cannot be, by the trainer; empty: nothing is wrong.")


class Reader(Body):
    reader: str
    wants: int = Field(description="The step it wants next.")
    lag_steps: int = Field(description="Trained steps it has not had yet.")


class Journal(Body):
    first: int | None = Field(description="Oldest step in the journal; null: it holds none.")
    last: int = Field(description="Newest trained step.")
    dropped: int = Field(description="Steps up to this one have left it.")
    retention: int = Field(description="Steps kept for replay beyond what the oldest kept checkpoint needs.")
    retention_bytes: int = Field(description="Of those, only as many as fit into so many bytes; 0: no such limit.")
    retention_seconds: float = Field(description="Of those, only what was trained in the last so many seconds; 0: no such limit.")
    spill: str = Field(description="Where payloads go that leave Redis; empty: they are deleted.")
    to_spill: int
    readers: list[Reader]
    shadows: list[dict[str, object]] = Field(description="Trainers that follow the journal and take nothing away.")


class Blocked(Body):
    edge: str
    since: float = Field(description="Unix seconds.")
    seconds: float
    stalled: bool = Field(description="It has lasted longer than run.stall_seconds, and nobody at its other end moves.")
    waiting: list[str] = Field(description="Who waits because of it, each with the edge it sees itself.")
    why: str
    what_to_do: str


class Watchdog(Body):
    stalled: bool
    stall_seconds: float = Field(description="How long an edge may block before it is a stall.")
    blocked: list[Blocked] = Field(description="Every blocked edge at its root, the longest first.")


class Flow(Body):
    """Tokens of one bucket."""

    generated: int
    trained: int
    masked: int
    dropped: dict[str, int]
    outstanding: int
    trained_share: float | None = Field(description="Trained of generated. Of an age it says little, and may be over 1: tokens age until they are trained.")

    @classmethod
    def of(cls, flow: bias_report.Flow) -> Flow:
        return cls(
            generated=flow.generated,
            trained=flow.trained,
            masked=flow.masked,
            dropped=dict(flow.dropped),
            outstanding=flow.outstanding,
            trained_share=flow.trained_share,
        )


class Bias(Body):
    complete: bool = Field(description="False: counted from what was left of the audit when this service began.")
    total: Flow
    lengths: dict[str, Flow] = Field(description="By the sampled tokens of a rollout, up to each power of two; unknown: nobody told.")
    ages: dict[str, Flow] = Field(description="By steps behind the newest trained one: generated when stored, dropped when dropped, the rest in their step.")
    dropped_groups: dict[str, int]
    unaccounted_tokens: int = Field(description="Tokens whose end is not in the record; 0 unless a part of it is missing.")


class Weights(Body):
    newest: str | None
    digest: str | None
    kind: str | None = Field(description="full, or delta: its files hold what changed since the version before.")
    changed_share: float | None = Field(description="Of its elements, those that changed; null: it was published whole.")
    total_bytes: int | None = Field(description="Of the tensors that its files hold.")
    trained: int
    publish_lag_steps: int | None = Field(description="Newest trained step minus the newest published one.")
    published: int
    published_bytes: int
    deltas: int = Field(description="Of those published, versions that hold only what changed.")
    transport: str | None = Field(description="weights.transport as this service has it configured.")
    applied: int
    applied_by_transport: dict[str, int] = Field(description="Updates that engines took, by what brought them.")
    fallbacks: int | None = Field(description="Updates that the store brought although another transport is configured; null: not known which is.")
    troubles: list[str] = Field(description="What is wrong with engines and with the way of versions to them, for people.")
    pause_mean_s: float | None
    pause_max_s: float | None
    engines: list[EngineWeights]
    weight_servers: list[dict[str, object]] = Field(description="Processes that send versions to engines; staged: the newest that they can send.")
    relays: list[dict[str, object]] = Field(description="Processes that keep versions whole in a machine's memory; version: the newest there.")


class Members(Body):
    """Engines, producers, trainers or launchers, with every field they report."""

    members: list[dict[str, object]]


def staleness(picture: Picture) -> Staleness:
    return Staleness(
        trained=_trained(picture),
        complete=picture.complete,
        total=Spread.of(picture.staleness),
        recent=Spread.of(picture.recent_staleness),
        ready=Spread.of(picture.ready_age),
        publish_lag=Spread.of(picture.publish_lag),
        masked_tokens=picture.totals.masked,
        engines=_lags(picture),
    )


def buffer(picture: Picture) -> Buffer:
    ledger = picture.ledger
    assert ledger is not None
    return Buffer(
        state=ledger.state.value,
        incarnation=ledger.incarnation,
        trained=ledger.trained,
        next_seq=ledger.next_seq,
        low_seq=ledger.low_seq,
        generating=ledger.generating,
        ready=ledger.ready,
        leased=ledger.leased,
        released=ledger.released,
        outstanding=ledger.outstanding,
        admission_limit=ledger.admission_limit,
        trained_groups=ledger.trained_groups,
        dead={str(reason): count for reason, count in ledger.dead.items()},
        releases={str(reason): count for reason, count in ledger.releases.items()},
        bytes_used=ledger.bytes_used,
        byte_budget=ledger.byte_budget,
        checkpoints=[{**to_json(found)} for found in ledger.checkpoints],
        selection=picture.settings.selection.value,
        letters=ledger.letters,
        to_spill=ledger.to_spill,
        spill_problem=picture.spill_problem,
    )


def journal(picture: Picture) -> Journal:
    ledger, settings = picture.ledger, picture.settings
    assert ledger is not None
    readers = [Reader(reader=name, wants=step, lag_steps=max(0, ledger.trained + 1 - step)) for name, step in sorted(ledger.readers.items())]
    return Journal(
        first=ledger.dropped + 1 if ledger.trained > ledger.dropped else None,
        last=ledger.trained,
        dropped=ledger.dropped,
        retention=settings.retention,
        retention_bytes=settings.retention_bytes,
        retention_seconds=settings.retention_seconds,
        spill=settings.spill,
        to_spill=ledger.to_spill,
        readers=readers,
        shadows=[{**to_json(status)} for status in picture.shadows],
    )


def watchdog(picture: Picture) -> Watchdog:
    found = [
        Blocked(
            edge=stall.edge.value,
            since=stall.since,
            seconds=stall.seconds(picture.at),
            stalled=stall.lasts(picture.at, picture.patience_s),
            waiting=list(stall.waiting),
            why=stall.why,
            what_to_do=stall.what_to_do,
        )
        for stall in picture.blocked
    ]
    return Watchdog(stalled=any(one.stalled for one in found), stall_seconds=picture.patience_s, blocked=found)


def bias(found: bias_report.Bias, *, complete: bool = True) -> Bias:
    def named(flows: Mapping[int, bias_report.Flow]) -> dict[str, Flow]:
        return {"unknown" if bucket == bias_report.UNKNOWN else str(bucket): Flow.of(flow) for bucket, flow in flows.items()}

    return Bias(
        complete=complete,
        total=Flow.of(found.total),
        lengths=named(found.lengths),
        ages=named(found.ages),
        dropped_groups=dict(found.dropped_groups),
        unaccounted_tokens=found.unaccounted,
    )


def weights(picture: Picture) -> Weights:
    newest, totals = picture.newest, picture.totals
    return Weights(
        newest=str(newest.version) if newest else None,
        digest=newest.digest if newest else None,
        kind=newest.kind if newest else None,
        changed_share=picture.changed_share,
        total_bytes=newest.total_bytes if newest else None,
        trained=_trained(picture),
        publish_lag_steps=picture.lag(newest.version) if newest else None,
        published=totals.published,
        published_bytes=totals.published_bytes,
        deltas=totals.deltas,
        transport=picture.transport or None,
        applied=totals.applied,
        applied_by_transport=dict(sorted(totals.by_transport.items())),
        fallbacks=trouble.fallbacks(picture),
        troubles=[*(one.sentence for one in trouble.troubles(picture)), *trouble.channel(picture)],
        pause_mean_s=totals.pause_s / totals.applied if totals.applied else None,
        pause_max_s=totals.pause_max_s if totals.applied else None,
        engines=[_engine_weights(picture, status) for status in picture.engines],
        weight_servers=[{**to_json(status)} for status in picture.weight_servers],
        relays=[{**to_json(status)} for status in picture.relays],
    )


def _engine_weights(picture: Picture, status: EngineStatus) -> EngineWeights:
    lag = picture.lag(status.version)
    found = trouble.trouble_of(status, lag, picture.settings.max_staleness)
    return EngineWeights(
        engine_id=status.engine_id,
        version=str(status.version) if status.version else None,
        lag_steps=lag,
        state=status.state.value,
        target=str(status.target) if status.target else None,
        transport=status.transport,
        updates=status.updates,
        paused_s=status.paused_s,
        trouble="" if found is None else found.why,
    )


def engines(picture: Picture) -> Members:
    """`resting`: producers that leave it alone for a while, and why."""
    rests = trouble.resting(picture)
    return Members(
        members=[{**to_json(status), "lag_steps": picture.lag(status.version), "resting": rests.get(status.engine_id, {})} for status in picture.engines]
    )


def producers(picture: Picture) -> Members:
    return Members(members=[{**to_json(status)} for status in picture.producers])


def trainers(picture: Picture) -> Members:
    return Members(members=[{**to_json(status)} for status in picture.trainers])


def launchers(picture: Picture) -> Members:
    return Members(members=[{**to_json(status)} for status in picture.launchers])


def bias_of(picture: Picture) -> Bias:
    assert picture.bias is not None
    return bias(picture.bias, complete=picture.complete)


def _trained(picture: Picture) -> int:
    return picture.ledger.trained if picture.ledger else 0


def _lags(picture: Picture) -> list[EngineLag]:
    return [
        EngineLag(engine_id=status.engine_id, version=str(status.version) if status.version else None, lag_steps=picture.lag(status.version))
        for status in picture.engines
    ]
