"""Evaluations over HTTP: the newest of them as a list, and the newest of each phase and set as gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from deploy.http.bodies import Body
from deploy.snapshot import Picture
from protocol.errors import DecodeError
from protocol.versions import Version


class Eval(Body):
    at: float = Field(description="Unix seconds: when it was recorded.")
    phase: str = Field(description="first, periodic, final, or checkpoint (by hand, of a saved model).")
    set: str = Field(description="The held-out set; main is eval.path.")
    version: str | None = Field(description="What it is of: the version it was asked of. Null: a model that is no version of this run.")
    pinned: bool = Field(description="Every token was written by that version.")
    mixed: int = Field(description="Samples with a token of another version.")
    versions: list[str] = Field(description="All that wrote a token, oldest first.")
    samples: int
    failed: int
    reward: float | None = Field(description="Mean. Null: nothing was answered.")
    exact: float | None = Field(description="Share of samples with the full reward. Null: nothing was answered.")
    tokens: int | None = Field(description="Sampled.")
    seconds: float
    by: str = Field(description="The producer that evaluated; of a saved model, what it is.")


class Evals(Body):
    evals: list[Eval] = Field(description="The newest 256, newest first.")
    complete: bool = Field(description="False: those before this service began are only those that were left in the audit then.")


def evals(picture: Picture) -> Evals:
    return Evals(evals=[_eval(found) for found in reversed(picture.totals.evaluations)], complete=picture.complete)


def _eval(found: Mapping[str, Any]) -> Eval:
    versions = [str(version) for version in found.get("versions") or ()]
    single = versions[0] if len(versions) == 1 else None
    return Eval(
        at=float(found["at"]),
        phase=str(found["phase"]),
        set=str(found["set"]),
        version=found.get("version", single),
        pinned=bool(found.get("pinned", single is not None)),
        mixed=int(found.get("mixed", 0)),
        versions=versions,
        samples=int(found.get("samples", 0)),
        failed=int(found.get("failed", 0)),
        reward=found.get("reward"),
        exact=found.get("exact"),
        tokens=found.get("tokens"),
        seconds=float(found.get("seconds", 0.0)),
        by=str(found.get("producer_id") or found.get("model") or ""),
    )


def line(picture: Picture) -> str:
    """The newest of each set of the run itself, for people; empty before the first."""
    newest: dict[str, Eval] = {}
    for found in evals(picture).evals:
        if found.phase != "checkpoint" and found.reward is not None:
            newest.setdefault(found.set, found)
    told = [f"{one.set} exact {one.exact:.3f}, reward {one.reward:.3f} at {_of(one)} ({one.phase}, {one.samples} samples)" for one in newest.values()]
    return f"held out: {'; '.join(sorted(told))}" if told else ""


def _of(one: Eval) -> str:
    return str(one.version) if one.pinned or len(one.versions) < 2 else f"{one.versions[0]} to {one.versions[-1]}"


def gauges(picture: Picture, run: str) -> Iterator[Metric]:
    """The newest of each phase and set."""
    figures: dict[str, tuple[str, Callable[[Eval], float | None]]] = {
        "rollstream_eval_reward_mean": ("Mean held-out reward of the newest evaluation.", lambda one: one.reward),
        "rollstream_eval_exact_ratio": ("Share of its samples with the full reward.", lambda one: one.exact),
        "rollstream_eval_version_step": ("n of the version it is of.", _n),
        "rollstream_eval_pinned": ("1 if that version wrote every token.", lambda one: float(one.pinned)),
        "rollstream_eval_failed_samples": ("Samples of it that failed.", lambda one: one.failed),
    }
    newest = [_eval(found) for _, found in sorted(picture.totals.newest_evaluations.items())]
    for name, (text, value_of) in figures.items():
        family = GaugeMetricFamily(name, text, labels=["run", "phase", "set"])
        for one in newest:
            if (value := value_of(one)) is not None:
                family.add_metric([run, one.phase, one.set], value)
        yield family


def _n(one: Eval) -> float | None:
    try:
        return None if one.version is None else float(Version.parse(one.version).n)
    except DecodeError:
        return None
