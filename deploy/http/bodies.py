"""Bodies of the HTTP service. Units are in the names; staleness and lag are in steps."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from deploy.snapshot import Picture
from deploy.tally import Distribution
from protocol.codec import to_json


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


class Weights(Body):
    newest: str | None
    digest: str | None
    total_bytes: int | None
    trained: int
    publish_lag_steps: int | None = Field(description="Newest trained step minus the newest published one.")
    published: int
    applied: int
    pause_mean_s: float | None
    pause_max_s: float | None
    engines: list[EngineLag]


class Members(Body):
    """Engines, producers or trainers, with every field they report."""

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
    )


def weights(picture: Picture) -> Weights:
    newest, totals = picture.newest, picture.totals
    return Weights(
        newest=str(newest.version) if newest else None,
        digest=newest.digest if newest else None,
        total_bytes=newest.total_bytes if newest else None,
        trained=_trained(picture),
        publish_lag_steps=picture.lag(newest.version) if newest else None,
        published=totals.published,
        applied=totals.applied,
        pause_mean_s=totals.pause_s / totals.applied if totals.applied else None,
        pause_max_s=totals.pause_max_s if totals.applied else None,
        engines=_lags(picture),
    )


def engines(picture: Picture) -> Members:
    return Members(members=[{**to_json(status), "lag_steps": picture.lag(status.version)} for status in picture.engines])


def producers(picture: Picture) -> Members:
    return Members(members=[{**to_json(status)} for status in picture.producers])


def trainers(picture: Picture) -> Members:
    return Members(members=[{**to_json(status)} for status in picture.trainers])


def _trained(picture: Picture) -> int:
    return picture.ledger.trained if picture.ledger else 0


def _lags(picture: Picture) -> list[EngineLag]:
    return [
        EngineLag(engine_id=status.engine_id, version=str(status.version) if status.version else None, lag_steps=picture.lag(status.version))
        for status in picture.engines
    ]
