from __future__ import annotations

import doctest
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.up import supervisor
from deploy.up.supervisor import STOP_ORDER, Child, Command, Finish, Kill, Phase, Policy, Role, Settle, Start, Supervisor, Terminate

REDIS, TRAINER = Child(Role.REDIS), Child(Role.TRAINER)
ENGINES = (Child(Role.ENGINE, 0), Child(Role.ENGINE, 1))
PRODUCERS = (Child(Role.PRODUCER, 0), Child(Role.PRODUCER, 1))
EVERYONE = (REDIS, TRAINER, *ENGINES, *PRODUCERS)
POLICY = Policy()


def make(children: Iterable[Child] = EVERYONE) -> Supervisor:
    core = Supervisor(children, POLICY, Random(0))
    core.begin(0.0)
    return core


def names(commands: list[Command]) -> list[str]:
    return [str(command) for command in commands]


def test_the_example_of_the_module_runs():
    assert doctest.testmod(supervisor).failed == 0


def test_begin_starts_everyone_who_does_not_run():
    core = Supervisor(EVERYONE, POLICY, Random(0))
    assert names(core.begin(0.0, running=[REDIS, PRODUCERS[1]])) == ["start trainer-0", "start engine-0", "start engine-1", "start producer-0"]
    assert core.deadline() is None


@pytest.mark.parametrize("code", [1, 75, -9, -11, 4])
def test_a_failed_child_is_started_again_after_a_while(code: int):
    core = make()
    assert core.exited(ENGINES[0], code, 1.0) == []
    due = core.deadline()
    assert due is not None
    assert 1.0 + POLICY.backoff_s * 0.5 <= due <= 1.0 + POLICY.backoff_s * 1.5
    assert core.tick(due - 0.01) == []
    assert names(core.tick(due)) == ["start engine-0"]
    assert core.lives[ENGINES[0]].restarts == 1


def test_the_wait_grows_with_each_failure_up_to_its_cap_and_starts_anew_after_a_healthy_life():
    core, now, waits = make(), 0.0, []
    for _ in range(POLICY.max_failures):
        assert core.exited(PRODUCERS[0], 1, now) == []
        due = core.deadline()
        assert due is not None
        waits.append(due - now)
        now = due
        core.tick(now)
    assert waits[0] <= POLICY.backoff_s * 1.5
    assert max(waits) > POLICY.backoff_s * 2**5
    assert max(waits) <= POLICY.backoff_cap_s * 1.5
    core.exited(PRODUCERS[0], 1, now + POLICY.healthy_s)
    due = core.deadline()
    assert due is not None
    assert due - (now + POLICY.healthy_s) <= POLICY.backoff_s * 1.5


def test_a_child_that_cannot_live_ends_the_run_with_its_last_words():
    core, now = make(), 0.0
    for _ in range(POLICY.max_failures):
        core.exited(ENGINES[1], 1, now, message="no memory")
        now = core.deadline() or now
        core.tick(now)
    assert names(core.exited(ENGINES[1], 1, now, message="no memory")) == ["terminate trainer-0"]
    finish = play_out(core, now)
    assert finish.code == 1
    assert "engine-1 failed 9 times" in finish.message
    assert "no memory" in finish.message


@pytest.mark.parametrize("role", [Role.RELAY, Role.WEIGHT_SERVER])
def test_a_run_goes_on_without_who_only_makes_weights_faster(role: Role):
    carrier = Child(role)
    core, now = make([*EVERYONE, carrier]), 0.0
    for _ in range(POLICY.max_failures * 2):
        assert core.exited(carrier, -9, now) == []
        now = core.deadline() or now
        assert names(core.tick(now)) == [f"start {carrier}"]


@pytest.mark.parametrize("role", [Role.RELAY, Role.WEIGHT_SERVER])
def test_a_carrier_that_cannot_run_any_more_is_started_again_for_ever_and_one_that_never_could_ends_the_run(role: Role):
    carrier = Child(role)
    core, now = make([*EVERYONE, carrier]), 0.0
    core.exited(carrier, -9, now)
    for _ in range(POLICY.max_failures * 2):
        now = core.deadline() or now
        assert names(core.tick(now)) == [f"start {carrier}"]
        assert core.exited(carrier, 2, now, message="nothing can be written to the folder") == []
    core = make([*EVERYONE, carrier])
    core.exited(carrier, 2, 1.0, message="nothing can be written to the folder")
    finish = play_out(core, 1.0)
    assert (finish.code, "nothing can be written" in finish.message) == (2, True)


def test_weights_are_carried_until_the_last_engine_has_left():
    carriers = (Child(Role.RELAY), Child(Role.WEIGHT_SERVER))
    core = make([REDIS, TRAINER, *carriers, ENGINES[0]])
    core.stop(1.0)
    assert core.exited(TRAINER, 0, 1.0) == [Terminate(ENGINES[0])]
    assert core.exited(ENGINES[0], 0, 2.0) == [Terminate(carriers[0])]
    assert core.exited(carriers[0], 0, 2.0) == [Terminate(carriers[1])]
    assert core.exited(carriers[1], 0, 2.0) == [Settle()]


def test_try_again_is_never_counted_as_a_failure():
    core, now = make(), 0.0
    for _ in range(POLICY.max_failures * 3):
        assert core.exited(PRODUCERS[0], 75, now) == []
        now = core.deadline() or now
        assert names(core.tick(now)) == ["start producer-0"]


@pytest.mark.parametrize("child", [TRAINER, ENGINES[0], PRODUCERS[1]])
def test_bad_configuration_is_never_restarted_and_ends_the_run_with_exit_2(child: Child):
    core = make()
    core.exited(child, 2, 1.0, message="rl-producer: run.toml:3: unknown key")
    assert core.lives[child].phase is Phase.DONE
    finish = play_out(core, 1.0)
    assert finish.code == 2
    assert "unknown key" in finish.message
    assert core.lives[child].restarts == 0


def test_a_trainer_that_was_replaced_is_final_and_the_record_of_the_run_is_left_to_whoever_has_it_now():
    core = make()
    assert set(names(core.exited(TRAINER, 3, 1.0, message="incarnation 2 is attached"))) == {"terminate producer-0", "terminate producer-1"}
    told: list[Command] = []
    for child in (*PRODUCERS, *ENGINES):
        told = core.exited(child, 0, 2.0)
    assert told == [Terminate(REDIS)], "no summary is written"
    (finish,) = core.exited(REDIS, 0, 3.0)
    assert isinstance(finish, Finish)
    assert (finish.code, core.lives[TRAINER].restarts) == (1, 0)
    assert "trainer-0 was replaced" in finish.message
    assert "incarnation 2" in finish.message


def test_an_engine_that_was_replaced_stays_away_and_the_run_goes_on():
    core = make()
    assert core.exited(ENGINES[0], 3, 1.0) == []
    assert core.deadline() is None
    assert core.lives[ENGINES[0]].phase is Phase.DONE
    assert not core.ending
    core.exited(TRAINER, 0, 2.0)
    assert play_out(core, 2.0) == Finish(0)


def test_a_drained_trainer_begins_the_end_and_the_rest_may_leave_by_themselves():
    core = make()
    assert core.exited(TRAINER, 0, 100.0) == []
    assert core.exited(PRODUCERS[0], 0, 101.0) == []
    assert core.deadline() == 100.0 + POLICY.alone_s[Role.PRODUCER]
    assert core.exited(PRODUCERS[1], 0, 102.0) == []
    assert core.exited(ENGINES[1], 0, 103.0) == []
    assert names(core.exited(ENGINES[0], 0, 103.5)) == ["settle"]
    assert names(core.settled(104.0)) == ["terminate redis-0"]
    assert core.exited(REDIS, 0, 104.5) == [Finish(0)]


def test_an_engine_that_dies_while_producers_finish_is_started_again():
    core = make()
    core.exited(TRAINER, 0, 100.0)
    assert core.exited(ENGINES[0], -9, 101.0) == []
    assert "start engine-0" in names(core.tick(103.0))


def test_those_who_do_not_leave_by_themselves_are_asked_and_then_killed_and_the_exit_code_says_so():
    core = make()
    core.exited(TRAINER, 0, 0.0)
    core.exited(PRODUCERS[0], 0, 1.0)
    asked = POLICY.alone_s[Role.PRODUCER]
    assert core.tick(asked) == [Terminate(PRODUCERS[1])]
    assert core.tick(asked + POLICY.stop_s[Role.PRODUCER]) == [Kill(PRODUCERS[1])]
    core.exited(PRODUCERS[1], -9, 300.0)
    finish = play_out(core, 300.0)
    assert finish.code == 1
    assert "producer-1 did not stop" in finish.message


def test_stop_asks_one_role_after_the_other():
    core = make()
    assert core.stop(10.0) == [Terminate(TRAINER)]
    assert core.exited(TRAINER, 0, 11.0) == [Terminate(PRODUCERS[0]), Terminate(PRODUCERS[1])]
    assert core.exited(PRODUCERS[0], 0, 12.0) == []
    assert core.exited(PRODUCERS[1], 0, 12.0) == [Terminate(ENGINES[0]), Terminate(ENGINES[1])]
    core.exited(ENGINES[0], 0, 13.0)
    assert core.exited(ENGINES[1], 0, 13.0) == [Settle()]
    assert core.settled(13.0) == [Terminate(REDIS)]
    assert core.exited(REDIS, 0, 14.0) == [Finish(0)]


def test_a_trainer_that_did_not_drain_makes_the_stop_a_fault():
    core = make()
    core.stop(1.0)
    core.exited(TRAINER, -15, 1.1)
    finish = play_out(core, 1.1)
    assert finish.code == 1
    assert "--resume" in finish.message


def test_a_second_stop_ends_everyone_at_once():
    core = make()
    core.stop(1.0)
    commands = core.stop(2.0)
    assert {command.child for command in commands if isinstance(command, Kill)} == set(EVERYONE)
    finish = play_out(core, 2.0)
    assert finish.code == 1


def test_stop_during_the_end_of_a_drained_run_only_makes_it_faster():
    core = make()
    core.exited(TRAINER, 0, 1.0)
    assert core.stop(2.0) == [Terminate(PRODUCERS[0]), Terminate(PRODUCERS[1])]
    assert play_out(core, 2.0) == Finish(0)


def test_stop_calls_off_restarts_that_were_due():
    core = make()
    core.exited(ENGINES[0], -9, 1.0)
    core.stop(1.1)
    assert "start engine-0" not in names(core.tick(60.0))


def test_redis_is_restarted_while_the_others_drain():
    core = make()
    core.stop(1.0)
    assert core.exited(REDIS, -9, 1.5) == []
    assert "start redis-0" in names(core.tick(4.0))


def test_a_child_that_leaves_in_good_order_comes_back_unless_the_run_ends_first():
    core = make()
    assert core.exited(PRODUCERS[0], 0, 1.0) == []
    assert core.deadline() == 1.0 + POLICY.idle_s
    core.exited(TRAINER, 0, 2.0)
    assert core.lives[PRODUCERS[0]].phase is Phase.DONE


def test_a_child_that_is_held_is_asked_for_again_and_counts_no_restart():
    core = make()
    core.exited(PRODUCERS[0], 0, 1.0)
    for at in (2.0, 3.0, 4.0):
        assert names(core.tick(at)) == ["start producer-0"]
        assert core.hold(PRODUCERS[0], at) == []
    assert core.lives[PRODUCERS[0]].restarts == 0
    core.exited(TRAINER, 0, 4.5)
    assert core.deadline() == 4.5 + POLICY.alone_s[Role.PRODUCER], "the other producer's"


def test_a_child_that_is_held_after_the_end_began_is_done_and_the_end_goes_on():
    core = make([REDIS, TRAINER, PRODUCERS[0]])
    core.exited(PRODUCERS[0], 0, 1.0)
    assert names(core.tick(2.0)) == ["start producer-0"]
    assert core.exited(TRAINER, 0, 2.1) == [], "the producer may have been started"
    assert core.hold(PRODUCERS[0], 2.2) == [Settle()]


def test_a_failed_summary_is_a_fault_and_redis_still_ends():
    core = make([REDIS, TRAINER])
    assert core.exited(TRAINER, 0, 1.0) == [Settle()]
    assert core.settled(2.0, failure="disk full") == [Terminate(REDIS)]
    assert core.exited(REDIS, 0, 3.0) == [Finish(1, "disk full")]


def test_more_are_started_and_fewer_leave_in_good_order_and_are_not_started_again():
    core = make()
    added = [Child(Role.PRODUCER, 2), Child(Role.ENGINE, 4)]
    assert names(core.scale(added, [], 1.0)) == ["start producer-2", "start engine-4"]
    assert names(core.scale([], [PRODUCERS[1], added[1]], 2.0)) == ["terminate producer-1", "terminate engine-4"]
    assert core.exited(PRODUCERS[1], 0, 3.0) == core.exited(added[1], 0, 3.0) == []
    assert core.deadline() is None
    assert [core.lives[child].phase for child in (PRODUCERS[1], added[1], added[0])] == [Phase.DONE, Phase.DONE, Phase.RUNNING]
    core.exited(PRODUCERS[0], -9, 4.0)
    assert core.scale([], [PRODUCERS[0]], 4.1) == [], "nobody is there to be asked"
    assert core.tick(60.0) == [], "its restart is called off"
    assert names(core.scale([PRODUCERS[1]], [], 61.0)) == ["start producer-1"]
    core.exited(TRAINER, 0, 100.0)
    assert play_out(core, 100.0) == Finish(0)


def test_who_is_wanted_again_while_it_leaves_comes_back():
    core = make()
    core.scale([], [PRODUCERS[1]], 1.0)
    assert core.scale([PRODUCERS[1]], [], 2.0) == []
    assert core.exited(PRODUCERS[1], 0, 3.0) == []
    assert names(core.tick(3.0 + POLICY.idle_s)) == ["start producer-1"]


def test_who_was_added_and_cannot_live_is_given_up_alone():
    core, now = make(), 1.0
    refused, failing = Child(Role.PRODUCER, 2), Child(Role.ENGINE, 2)
    core.scale([refused, failing], [], now)
    assert core.exited(refused, 2, now, message="no such data set") == []
    for _ in range(POLICY.max_failures + 1):
        assert core.exited(failing, 1, now, message="no such device") == []
        now = core.deadline() or now
        core.tick(now)
    assert not core.ending
    assert "no such data set" in core.lives[refused].why
    assert "engine-2 failed 9 times in a row" in core.lives[failing].why
    assert names(core.scale([refused], [], now)) == ["start producer-2"], "it is tried again when it is wished for again"
    assert core.lives[refused].why == ""
    core.exited(TRAINER, 0, now)
    assert play_out(core, now) == Finish(0)


def test_a_run_that_ends_is_not_scaled():
    core = make()
    core.stop(1.0)
    assert core.scale([Child(Role.PRODUCER, 2)], [PRODUCERS[0]], 2.0) == []
    assert Child(Role.PRODUCER, 2) not in core.lives


def test_what_the_kernel_does_not_let_go_is_left_behind_and_the_end_goes_on():
    core = make([REDIS, TRAINER, ENGINES[0]])
    core.stop(0.0)
    core.exited(TRAINER, 0, 1.0)
    killed = 1.0 + POLICY.stop_s[Role.ENGINE]
    assert core.tick(killed) == [Kill(ENGINES[0])]
    assert core.tick(killed + POLICY.reap_s) == [Settle()]
    assert core.exited(ENGINES[0], -9, killed + POLICY.reap_s + 1) == [], "later it is nobody's"
    finish = play_out(core, killed + POLICY.reap_s + 1)
    assert finish.code == 1
    assert "engine-0 did not stop" in finish.message


def test_one_that_leaves_as_fewer_are_wanted_and_is_held_by_the_kernel_does_not_begin_the_end():
    core = make()
    core.scale([], [ENGINES[1]], 0.0)
    assert core.tick(POLICY.stop_s[Role.ENGINE]) == [Kill(ENGINES[1])]
    assert core.tick(POLICY.stop_s[Role.ENGINE] + POLICY.reap_s) == []
    assert not core.ending
    assert "the kernel holds it" in core.lives[ENGINES[1]].why


def play_out(core: Supervisor, now: float) -> Finish:
    """Everyone who is asked or killed leaves at once, everyone else when asked; until Finish."""
    commands: list[Command] = []
    for _ in range(1000):
        now += 0.1
        for command in commands:
            if isinstance(command, Finish):
                return command
        if any(isinstance(command, Settle) for command in commands):
            commands = core.settled(now)
            continue
        leaving = [child for child, life in core.lives.items() if life.phase is Phase.STOPPING]
        if leaving:
            commands = core.exited(leaving[0], 0 if leaving[0].role is not Role.TRAINER else (core.lives[leaving[0]].code or 0), now)
        elif (due := core.deadline()) is not None:
            now = max(now, due)
            commands = core.tick(now)
        else:
            commands = core.settled(now)
    raise AssertionError("no Finish")


KINDS = st.sampled_from(["exit", "exit", "exit", "hold", "tick", "stop", "settled", "more", "fewer"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 5), st.sampled_from([0, 1, 2, 3, 75, -9])), max_size=60)


class World:
    """Carries out commands and checks that each makes sense."""

    def __init__(self) -> None:
        self.core = Supervisor(EVERYONE, POLICY, Random(1))
        self.now = 0.0
        self.alive: set[Child] = set()
        self.late: set[Child] = set()
        """Producers and engines that were started while the run ended."""
        self.settling = False
        self.finishes = 0
        self.carry_out(self.core.begin(self.now))

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert not self.finishes, "nothing comes after Finish"
            match command:
                case Start(child):
                    assert child not in self.alive
                    assert self.core.lives[child].wanted
                    self.alive.add(child)
                    if self.core.ending and child.role in (Role.PRODUCER, Role.ENGINE):
                        self.late.add(child)
                case Terminate(child) | Kill(child):
                    assert child in self.alive
                case Settle():
                    assert self.alive <= {REDIS}
                    self.settling = True
                case Finish():
                    assert not self.alive
                    self.finishes += 1

    def happen(self, kind: str, child: Child, code: int) -> None:
        self.now += 0.7
        if kind == "exit" and child in self.alive:
            self.alive.discard(child)
            self.carry_out(self.core.exited(child, code, self.now))
        elif kind == "hold" and child in self.alive and child.role in (Role.PRODUCER, Role.ENGINE) and self.core.lives[child].phase is Phase.RUNNING:
            self.alive.discard(child)
            self.carry_out(self.core.hold(child, self.now))
        elif kind == "tick" and (due := self.core.deadline()) is not None:
            self.now = max(self.now, due)
            killed = {child for child, life in self.core.lives.items() if life.killed and life.alive}
            commands = self.core.tick(self.now)
            self.alive -= {child for child in killed if not self.core.lives[child].alive}
            self.carry_out(commands)
        elif kind in ("more", "fewer") and child.role in (Role.PRODUCER, Role.ENGINE):
            wanted = self.core.lives[child].wanted and not self.core.lives[child].why
            more, fewer = ([child], []) if kind == "more" else ([], [child])
            if wanted is (kind == "fewer"):
                self.carry_out(self.core.scale(more, fewer, self.now))
        elif kind == "stop":
            self.carry_out(self.core.stop(self.now))
        elif kind == "settled" and self.settling:
            self.settling = False
            self.carry_out(self.core.settled(self.now))

    def end(self) -> None:
        """Whoever is asked leaves, and whoever is to come again has nothing to do."""
        held = [child for child, life in self.core.lives.items() if life.phase is Phase.RUNNING and child in self.late & self.alive]
        stopping = [child for child, life in self.core.lives.items() if life.phase is Phase.STOPPING]
        if not self.core.ending:
            self.happen("stop", REDIS, 0)
        elif self.settling:
            self.happen("settled", REDIS, 0)
        elif held:
            self.happen("hold", held[0], 0)
        elif stopping:
            self.happen("exit", stopping[0], 0)
        else:
            self.happen("tick", REDIS, 0)


@given(EVENTS)
def test_whatever_happens_the_end_comes_once_and_last_and_by_role(events: list[tuple[str, int, int]]):
    world = World()
    for kind, index, code in events:
        if not world.finishes:
            world.happen(kind, EVERYONE[index], code)
    for _ in range(1000):  # an engine that has nothing to do is held once a second, while producers have minutes to leave by themselves
        if not world.finishes:
            world.end()
    assert world.finishes == 1


def test_the_order_of_stopping_names_every_role():
    assert set(STOP_ORDER) == set(Role)
