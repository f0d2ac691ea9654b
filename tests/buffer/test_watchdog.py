"""The edge at the root, whatever the members say of themselves; every case by hand."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from buffer.contract import CheckpointRef, LedgerStatus, RunState
from buffer.watchdog import EdgeLog, Seen, Stall, blocked
from protocol.messages import Edge, EngineId, EngineState, EngineStatus, ProducerStatus, Reason, TrainerStatus
from protocol.versions import Fork, Lineage, Version

AT = 1_000.0
PATIENCE = 60.0
LEDGER = LedgerStatus(
    state=RunState.OPEN,
    incarnation=1,
    trained=7,
    next_seq=80,
    low_seq=0,
    generating=3,
    ready=1,
    leased=0,
    released=0,
    trained_groups=28,
    dead={},
    releases={},
    bytes_used=900,
    byte_budget=1_000,
    admission_limit=8,
    checkpoints=(CheckpointRef(step=4, incarnation=1, digest="d", path="p"),),
    lineage=Lineage({1: Fork(0, 0)}, 1),
    ready_versions={},
)
TRAINER = TrainerStatus(trainer_id="t", incarnation=1, step=8, trained=7, moved_at=AT - 1, host="h", pid=7)
HUNGRY = dataclasses.replace(TRAINER, waiting_for=Edge.NO_GROUP, waiting_since=AT - 70)
STUCK = dataclasses.replace(TRAINER, moved_at=AT - 90)
ENDING = dataclasses.replace(STUCK, waiting_for=Edge.NO_ACK, waiting_since=AT - 45)
GENERATING = ProducerStatus(producer_id="p0", inflight_groups=3)
ENGINE = EngineStatus(engine_id=EngineId("e0"), boot_nonce="b", url="u", kind="embedded", state=EngineState.ROUTABLE, version=Version(1, 7), running=5)
STARTING = dataclasses.replace(ENGINE, engine_id=EngineId("e1"), state=EngineState.STARTING, version=None)
UNFIT = dataclasses.replace(ENGINE, state=EngineState.UNFIT, reason="checksum")


def waiting(edge: Edge, seconds: float = 30.0, name: str = "p0") -> ProducerStatus:
    return ProducerStatus(producer_id=name, waiting_for=edge, waiting_since=AT - seconds)


def seen(
    *producers: ProducerStatus, trainer: TrainerStatus | None = TRAINER, engines: tuple[EngineStatus, ...] = (ENGINE,), ledger: LedgerStatus | None = LEDGER
) -> Seen:
    return Seen(
        at=AT,
        ledger=ledger,
        producers=producers,
        trainers=(trainer,) if trainer is not None else (),
        engines=engines,
        newest=Version(1, 7),
        last_producer_at=AT - 1 if producers else None,
        last_trainer_at=AT - 40,
    )


def told(look: Seen) -> list[tuple[Edge, float, bool]]:
    return [(stall.edge, stall.seconds(AT), stall.at_work) for stall in blocked(look, patience_s=PATIENCE)]


def only(look: Seen) -> Stall:
    (stall,) = blocked(look, patience_s=PATIENCE)
    return stall


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (seen(GENERATING), []),
        (seen(GENERATING, trainer=HUNGRY), [(Edge.NO_GROUP, 70, False)]),
        (seen(waiting(Edge.NO_SLOT)), [(Edge.NO_SLOT, 30, True)]),
        (seen(waiting(Edge.NO_SLOT), trainer=STUCK), [(Edge.NO_SLOT, 90, False)]),
        (seen(GENERATING, trainer=STUCK), [(Edge.NO_SLOT, 90, False)]),
        (seen(waiting(Edge.NO_SLOT), trainer=None), [(Edge.NO_TRAINER, 40, False)]),
        (seen(waiting(Edge.NO_BUDGET), trainer=None), [(Edge.NO_TRAINER, 40, False)]),
        (seen(waiting(Edge.NO_VERSION), trainer=None), [(Edge.NO_TRAINER, 40, False)]),
        (seen(GENERATING, trainer=dataclasses.replace(TRAINER, incarnation=0)), [(Edge.NO_TRAINER, 40, False)]),
        (seen(waiting(Edge.NO_SLOT), trainer=HUNGRY), [(Edge.NO_GROUP, 70, False)]),
        (seen(trainer=HUNGRY), [(Edge.NO_GROUP, 70, False)]),
        (seen(waiting(Edge.NO_ENGINE), engines=()), [(Edge.NO_ENGINE, 30, False)]),
        (seen(waiting(Edge.NO_ENGINE), engines=(), trainer=None), [(Edge.NO_TRAINER, 40, False), (Edge.NO_ENGINE, 30, False)]),
        (seen(waiting(Edge.NO_SLOT), engines=(UNFIT,), trainer=HUNGRY), [(Edge.NO_ENGINE, 70, False)]),
        (seen(waiting(Edge.NO_ENGINE)), [(Edge.NO_VERSION, 30, False)]),
        (seen(waiting(Edge.NO_VERSION), trainer=HUNGRY), [(Edge.NO_VERSION, 30, False)]),
        (seen(waiting(Edge.NO_BUDGET)), [(Edge.NO_BUDGET, 30, False)]),
        (seen(waiting(Edge.FIRST_EVALUATION), trainer=HUNGRY), [(Edge.FIRST_EVALUATION, 30, False)]),
        (seen(waiting(Edge.NO_TEACHER), waiting(Edge.NO_SLOT, 99, "p1"), trainer=HUNGRY), [(Edge.NO_TEACHER, 30, False)]),
        (seen(waiting(Edge.NO_SLOT), trainer=ENDING, engines=(ENGINE, STARTING)), [(Edge.NO_ACK, 45, False)]),
        (seen(waiting(Edge.NO_ENGINE), trainer=ENDING, engines=(STARTING,)), [(Edge.NO_ACK, 45, False), (Edge.NO_ENGINE, 30, False)]),
        (seen(waiting(Edge.NO_RUN, 12), waiting(Edge.NO_RUN, 33, "p1"), trainer=None, ledger=None), [(Edge.NO_RUN, 33, False)]),
        (seen(trainer=None, ledger=None), []),
        (seen(waiting(Edge.NO_SLOT), trainer=None, ledger=dataclasses.replace(LEDGER, state=RunState.DRAINING)), []),
        (seen(waiting(Edge.NO_SLOT), trainer=None, ledger=dataclasses.replace(LEDGER, dead={Reason.RECORDED: 4})), []),
    ],
)
def test_the_edge_is_the_one_at_the_root(look: Seen, expected: list[tuple[Edge, float, bool]]) -> None:
    assert told(look) == expected


def test_the_end_of_a_run_names_who_it_waits_for() -> None:
    behind = dataclasses.replace(ENGINE, engine_id=EngineId("e2"), version=Version(1, 6), target=Version(1, 7))
    evaluates = dataclasses.replace(STARTING, engine_id=EngineId("e3"), fleet="eval")
    stall = only(seen(waiting(Edge.NO_SLOT), trainer=ENDING, engines=(ENGINE, STARTING, behind, evaluates)))
    assert stall.waiting == ("p0: no slot", "trainer t: no ack")
    assert "step 7 was the last" in stall.why
    assert stall.why.endswith(": e1 is starting, e2 is routable, takes 1:7"), "neither who serves it nor who evaluates"


def test_a_trainer_that_never_attached_is_waited_for_since_the_first_producer_waits() -> None:
    look = seen(waiting(Edge.NO_TRAINER, 12), waiting(Edge.NO_TRAINER, 20, "p1"), trainer=None, ledger=dataclasses.replace(LEDGER, incarnation=0))
    stall = only(look)
    assert (stall.edge, stall.seconds(AT)) == (Edge.NO_TRAINER, 20)
    assert "no trainer has attached" in stall.why
    assert stall.waiting == ("p0: no trainer", "p1: no trainer")


def test_the_last_producer_is_gone_since_it_was_last_heard_of() -> None:
    stall = only(dataclasses.replace(seen(), last_producer_at=AT - 25))
    assert (stall.edge, stall.seconds(AT)) == (Edge.NO_GROUP, 25)
    assert "3 slots of theirs expire by themselves" in stall.why
    assert "start rl-producer" in stall.what_to_do


@pytest.mark.parametrize(
    ("newest", "why", "what_to_do"),
    [
        (None, "has published nothing", "log of the trainer"),
        (Version(1, 5), "the newest published version is 1:5, 2 steps behind the newest trained; e0 serves 1:3, takes 1:5", "publish_every"),
        (Version(1, 7), "1:7 is published, and no engine that may be asked is new enough; e0 serves 1:3, takes 1:5", "logs of the engines"),
    ],
)
def test_no_version_says_who_is_behind(newest: Version | None, why: str, what_to_do: str) -> None:
    engine = dataclasses.replace(ENGINE, version=Version(1, 3), target=Version(1, 5))
    stall = only(dataclasses.replace(seen(waiting(Edge.NO_VERSION), engines=(engine,)), newest=newest))
    assert why in stall.why
    assert what_to_do in stall.what_to_do


def test_a_full_budget_says_what_fills_it_and_a_failing_spill_why() -> None:
    plain = only(seen(waiting(Edge.NO_BUDGET)))
    assert "900 of 1000 bytes are in use; 28 trained groups stay until checkpoints cover them (trained 7, newest checkpoint 4)" in plain.why
    failing = dataclasses.replace(TRAINER, spill_problem="No space left on device")
    spill = only(seen(waiting(Edge.NO_BUDGET), trainer=failing, ledger=dataclasses.replace(LEDGER, to_spill=3)))
    assert "3 steps wait for the spill, which fails: No space left on device" in spill.why
    assert spill.what_to_do == "make buffer.spill writable"


def test_a_full_budget_with_a_stuck_trainer_names_the_trainer() -> None:
    found = {stall.edge: stall for stall in blocked(seen(waiting(Edge.NO_BUDGET), trainer=STUCK), patience_s=PATIENCE)}
    assert "t (pid 7 on h) is here, waits for nobody, and has not moved in step 8" in found[Edge.NO_BUDGET].why


def test_slow_generation_says_how_much_is_under_way_and_what_failed() -> None:
    failing = dataclasses.replace(GENERATING, groups_failed=5)
    stall = only(seen(failing, trainer=HUNGRY, ledger=dataclasses.replace(LEDGER, letters=2)))
    assert stall.why == (
        "3 groups are being generated and 1 are ready, too few for the next chunk of step 8; "
        "the engines decode 5 requests, 0 wait; 5 groups failed, 2 dead letters"
    )
    assert "rollstream letters list" in stall.what_to_do


def test_a_sentence_names_edge_time_reason_who_waits_and_what_to_do() -> None:
    many = [waiting(Edge.NO_SLOT, 10 + index, f"p{index}") for index in range(5)]
    sentence = only(seen(*many, trainer=None)).sentence(AT)
    assert sentence == (
        "no trainer for 40 s: the trainer of incarnation 1 is gone, after step 7 (p0: no slot, p1: no slot, p2: no slot and 2 more); "
        "start rl-trainer with --resume, and look at its log"
    )


def test_only_what_lasts_and_has_nobody_at_work_is_a_stall() -> None:
    slow, gone = only(seen(waiting(Edge.NO_SLOT, 3_600))), only(seen(waiting(Edge.NO_SLOT), trainer=None))
    assert not slow.lasts(AT, PATIENCE)
    assert not gone.lasts(AT, PATIENCE)
    assert gone.lasts(AT, 40.0)


def test_a_trainer_of_before_says_nothing_of_its_moves_and_is_not_called_stuck() -> None:
    assert told(seen(waiting(Edge.NO_SLOT), trainer=dataclasses.replace(TRAINER, moved_at=0.0))) == [(Edge.NO_SLOT, 30, True)]


def test_a_process_tells_once_that_it_is_blocked_and_once_that_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    log = EdgeLog(logging.getLogger("test"), "generation", 10.0)
    for at in range(100, 130):
        log.see(Edge.NO_SLOT if at < 120 else Edge.NO_BUDGET, 95.0 if at < 120 else 120.0, float(at))
    assert [record.message for record in caplog.records] == ["generation is blocked for 10 s: no slot; `rollstream status` says what holds it up"]
    log.see(None, 0.0, 131.0)
    log.see(None, 0.0, 132.0)
    assert [record.message for record in caplog.records[1:]] == ["generation goes on, after 36 s (no slot)"]


def test_a_short_wait_is_told_nobody(caplog: pytest.LogCaptureFixture) -> None:
    log = EdgeLog(logging.getLogger("test"), "training", 10.0)
    for at in (100.0, 105.0, 109.9):
        log.see(Edge.NO_GROUP, 100.0, at)
    log.see(None, 0.0, 110.0)
    assert caplog.records == []


def test_who_cannot_take_a_newer_version_says_why() -> None:
    behind = dataclasses.replace(ENGINE, version=Version(1, 3), target=Version(1, 7), trouble="prepare 1:7: no room")
    stall = only(seen(waiting(Edge.NO_VERSION), engines=(behind,)))
    assert "e0 serves 1:3 and cannot take a newer one (prepare 1:7: no room)" in stall.why
    starting = dataclasses.replace(ENGINE, state=EngineState.STARTING, version=None, trouble="prepare 1:7: no room")
    assert "e0 is starting (prepare 1:7: no room)" in only(seen(waiting(Edge.NO_ENGINE), engines=(starting,))).why


RESTS = dataclasses.replace(waiting(Edge.NO_ENGINE), resting={"e0": "broke the connection"})


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (seen(RESTS), "every engine that may be asked rests, as requests failed there: e0 (broke the connection)"),
        (seen(dataclasses.replace(RESTS, resting={"router": "answered 503"})), "rests, as requests failed there: router (answered 503)"),
        (seen(RESTS, engines=(ENGINE, dataclasses.replace(ENGINE, engine_id=EngineId("e1")))), "no engine that may be asked is new enough"),
        (seen(RESTS, waiting(Edge.NO_ENGINE, name="p1")), "no engine that may be asked is new enough"),
        (seen(RESTS, engines=(UNFIT,)), "no engine may be asked: e0 is unfit (checksum)"),
    ],
    ids=["all rest", "behind a router", "another does not", "for one of two", "unfit too"],
)
def test_engines_that_rest_for_all_who_wait_are_what_holds_the_run_up(look: Seen, why: str) -> None:
    (stall, *_) = [one for one in blocked(look, patience_s=PATIENCE) if one.edge in (Edge.NO_ENGINE, Edge.NO_VERSION)]
    assert why in stall.why
