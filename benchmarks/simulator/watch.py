"""What must hold of processes, slots and the weight channel while a world lives, and of every group when it has ended. Each check raises `Broken`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from benchmarks.simulator.engines import PAUSE_VALID_S, EngineHost
from benchmarks.simulator.kernel import Broken
from benchmarks.simulator.producers import Producer
from benchmarks.simulator.trainers import Trainer
from buffer.ledger_state import payload_name
from protocol.errors import RollstreamError
from protocol.messages import EngineState, GroupHeader, GroupState, Reason, Seq
from protocol.versions import Version

if TYPE_CHECKING:
    from benchmarks.simulator.world import World

_LEAKS_S = 3.0


class Watch:
    def __init__(self, world: World) -> None:
        self.world = world
        self._paused: dict[EngineHost, float] = {}
        """Those that the limit is about, and until when their right to be paused is valid."""
        self._leaking: dict[str, float] = {}
        """Slot token → since when its producer has not known of it."""
        self._prompts: dict[Seq, str] = {}
        world.kernel.at(_LEAKS_S, self._leaks)

    # engines ------------------------------------------------------------------------------------------------------------------------------------

    def after_call(self) -> None:
        """Only what took a version is routable; on-policy nothing is generated that the guard refuses, unless a rewind made it old."""
        for name, facts in self.world.server.channel.facts.items():
            host = self.world.places.get(name)
            if facts.state is not EngineState.ROUTABLE or not isinstance(host, EngineHost) or host.boot != facts.boot or not host.alive:
                continue
            if host.engine.label is None and not host.engine.restarts:
                raise Broken(f"W3: {name} is routable with {facts.version}, and this boot of it never took a version")
        if self.world.judge.on_policy and len(self.world.incarnations) == 1 and self.world.server.pure.state.releases[Reason.STALE]:
            raise Broken("S3: a group was generated on-policy that the guard refused, and there was no rewind")

    def loaded(self, host: EngineHost, version: Version) -> None:
        """An engine never goes back within an incarnation from what it acked."""
        acked = host.acked
        alone = len(host.reconcilers) == 1
        if acked is not None and acked.incarnation == version.incarnation and version < acked and (alone or not self._beyond_locks(host)):
            raise Broken(f"V3: {host.name} goes back from {acked} to {version}")

    def doubted(self, engine: str, labels: Collection[Version | None], acked: Version) -> None:
        """No engine is taken off the routes for an answer that is true: what it serves was trained before it was published (rule T4)."""
        known = all(label is not None and label >= acked and label in self.world.judge.versions for label in labels)
        if known and not self.world.server.regressed:
            raise Broken(f"T4: {engine} answers with {', '.join(map(str, labels))}, which were published, and the run has not trained them")

    def deleted(self, host: EngineHost, version: Version) -> None:
        """Nothing is deleted while an engine loads it."""
        if not self._beyond_locks(host):
            raise Broken(f"W5: {version} is deleted while {host.name} loads it")

    def paused(self, host: EngineHost, *, until: float, was_idle: bool) -> None:
        """The limit is about engines that are asked, or were busy; one that is off the routes has no more than a request that was under way to it."""
        world = self.world
        if world.kernel.now >= until:
            raise Broken(f"W8: {host.name} is paused on a right that ran out, and that others may have")
        if not was_idle or world.server.channel.is_routable(world.server.now_ms, host.name, host.boot):
            self._paused[host] = until
            self.arrives(host)

    def arrives(self, host: EngineHost) -> None:
        """Requests stand on no more engines than may be paused."""
        world, now = self.world, self.world.kernel.now
        if host not in self._paused:
            return
        busy = [one for one, until in self._paused.items() if world.places[one.name] is one and one.alive and now < until and one.engine.running]
        if len(busy) > world.scenario.max_paused and not any(self._beyond_locks(one) for one in busy):
            raise Broken(f"W8: {', '.join(sorted(one.name for one in busy))} are paused at once, {world.scenario.max_paused} may be")

    def _beyond_locks(self, host: EngineHost) -> bool:
        """Locks, pauses and pins run out by the server's clock and are lost with its writes: where that jumped just now, or there are two reconcilers on a
        server that lost writes, they protect from nothing.
        """
        world = self.world
        recent = world.kernel.now - 2 * PAUSE_VALID_S
        return max(world.mischief.clock_jumped_at, world.server.fell_at) > recent or (world.server.regressed > 0 and len(host.reconcilers) > 1)

    def let_go(self, host: EngineHost, owner: str) -> None:
        """Nobody lets an engine go on while another reconciler loads it."""
        loading = host.engine.loading
        if loading is not None and loading.owner != owner and not self._beyond_locks(host):
            raise Broken(f"W1: reconciler {owner} lets {host.name} go on while {loading.owner} loads it")
        self.resumed(host)

    def resumed(self, host: EngineHost) -> None:
        self._paused.pop(host, None)

    def sends(self, producer: Producer, engine: str, version: Version) -> None:
        """No request goes to an engine that is off the line, as far as its producer knows the line."""
        state, lineage = self.world.server.pure.state, producer.routing.lineage
        knows = lineage is not None and lineage.head == state.incarnation and lineage.forks == state.forks
        if knows and version.incarnation in state.forks and not state.lineage.contains(version):
            raise Broken(f"S3: {producer.name} sends a request to {engine}, which serves {version}, off the line of incarnation {state.incarnation}")

    # slots --------------------------------------------------------------------------------------------------------------------------------------

    def bound(self, seq: Seq, prompt: str) -> None:
        """A group has one prompt (rule S5), as long as the server keeps what it was told."""
        if self.world.server.regressed == 0 and self._prompts.setdefault(seq, prompt) != prompt:
            raise Broken(f"S5: group {seq} is bound to {prompt}, it was {self._prompts[seq]}")

    def lost(self, trainer: Trainer, header: GroupHeader) -> None:
        """No payload of a group that the attached trainer leased is gone unless something took it (rule P1)."""
        name = payload_name(header.seq, header.attempt, header.token)
        if trainer is self.world.judge.attached and not self.world.server.regressed and name not in self.world.mischief.spoiled:
            raise Broken(f"P1: the payload of group {header.seq} is gone, and nothing took it")

    def refused(self, problem: RollstreamError) -> None:
        """No put is refused for versions that the run does not know, though an engine serves them."""
        if not self.world.server.regressed:
            raise Broken(f"T4: {problem}")

    def expired(self, seq: Seq) -> None:
        """No slot expires that its producer kept alive as far as the server let it (rule S4): while that does not answer, nobody keeps anything alive."""
        for process in self.world.places.values():
            if isinstance(process, Producer) and process.alive and seq in process.held:
                quiet = max(process.trouble_until, process.frozen_until, process.cut_until)
                if self.world.server.answered_s(quiet) > 2 * self.world.scenario.settings.slot_seconds and self.world.server.regressed == 0:
                    raise Broken(f"S4: the slot of group {seq} expires, and {process.name} lives and names it")

    def _leaks(self) -> None:
        """No slot is kept alive in the name of a process that does not hold it (rule S2)."""
        now, state = self.world.kernel.now, self.world.server.pure.state
        owners = {one.owner: one for one in self.world.places.values() if isinstance(one, Producer) and one.alive}
        held = {seq: (state.groups[seq].token, owners.get(state.groups[seq].owner)) for seq in state.generating}
        unknown = [token for seq, (token, owner) in held.items() if owner is not None and owner.held.get(seq) != token]
        self._leaking = {token: self._leaking.get(token, now) for token in unknown}
        for token, since in self._leaking.items():
            if self.world.server.answered_s(since) > 3 * self.world.scenario.settings.slot_seconds and self.world.server.paused_until < now:
                raise Broken(f"S2: slot {token} has been kept for {now - since:.0f} s, and its producer does not hold it")
        self.world.kernel.at(_LEAKS_S, self._leaks)

    # steps --------------------------------------------------------------------------------------------------------------------------------------

    def trained(self, trainer: Trainer) -> None:
        """The ledger counts as many groups as the weights that count have learnt."""
        state = self.world.server.pure.state
        if trainer is self.world.judge.attached and state.trained_groups != len(trainer.weights.learnt):
            raise Broken(f"I2: the weights learnt from {len(trainer.weights.learnt)} groups, the ledger says {state.trained_groups}")

    def trainer_died(self) -> None:
        """The ledger has no step that no witness saw, once whoever did it is gone (rule R3)."""
        state = self.world.server.pure.state
        digest = state.digests.get(state.trained)
        if digest and not self.world.server.regressed and all(line.digest != digest for line in self.world.disk.witness):
            raise Broken(f"R3: step {state.trained} is trained, its trainer is gone, and the witness file does not know of it")

    # the end ------------------------------------------------------------------------------------------------------------------------------------

    def account(self, trainer: Trainer) -> None:
        """Every group is somewhere, and what the weights learnt is what ledger and witness say."""
        kernel, server = self.world.kernel, self.world.server
        state, weights = server.pure.state, trainer.weights
        for _ in range(int(state.settings.slot_seconds) + 2):
            kernel.now += 1.0
            server.pure.status(server.now_ms)
        if state.generating:
            raise Broken(f"I1: groups {sorted(state.generating)} are still generating, and no producer lives")
        trained = {seq for seq, group in state.groups.items() if group.state is GroupState.TRAINED and seq >= state.low_seq}
        dead = {seq for seq, group in state.groups.items() if group.state is GroupState.DEAD}
        unknown = {seq for seq in weights.learnt if seq >= state.low_seq} ^ trained
        if unknown or state.trained_groups != len(weights.learnt):
            raise Broken(
                f"I1: the ledger has {state.trained_groups} groups trained, the weights learnt {len(weights.learnt)}; they differ in {sorted(unknown)[:9]}"
            )
        died, outstanding = sum(state.dead.values()), state.outstanding + len(state.retry)
        if lost := state.next_seq - len(weights.learnt) - died - outstanding:
            raise Broken(f"I1: {lost} groups lost of {state.next_seq}: {len(weights.learnt)} trained, {died} dead, {outstanding} outstanding")
        if dead & weights.learnt:
            raise Broken(f"I1: dead groups {sorted(dead & weights.learnt)} are in the weights")
        if state.trained != weights.step:
            raise Broken(f"I2: the ledger has trained {state.trained} steps, the weights {weights.step}")
        self.world.judge.surviving(weights, self.world.disk.witness, state.incarnation, self.world.incarnations)

    def blocked(self) -> str:
        """Where everybody waits."""
        state, channel = self.world.server.pure.state, self.world.server.channel
        waits = [f"{name} {_waiting(process)}" for name, process in self.world.places.items()]
        waits += [f"{name} {facts.state.value} {facts.version}" for name, facts in channel.facts.items()]
        counts = f"{len(state.generating)} generating, {len(state.ready)} ready, {state.leased} leased of {state.policy.limit}, {len(state.retry)} to retry"
        return (
            f"waiting: {', '.join(waits)}; step {state.trained} of incarnation {state.incarnation}, newest version {channel.newest}, {counts}, "
            f"{state.bytes_used} of {state.settings.byte_budget} bytes"
        )


def _waiting(process: object) -> str:
    if not getattr(process, "alive", False):
        return "gone"
    edge = process.waiting_for if isinstance(process, Producer | Trainer) else None
    return edge.value if edge is not None else "at work"
