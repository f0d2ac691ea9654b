"""A trainer's backend without torch, whose weights are a digest of everything that was trained, in order.

    chain(s) = xxh3-128 of chain(s - 1), a random number, the groups of step s with their tokens and rewards, and the tokens that entered its loss

So weights that equal the chain of the surviving steps have seen each of their groups, once, whole, in that order, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from buffer.witness import WitnessLine
from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch
from consumer.config import TrainerConfig
from consumer.losses import LossConfig
from protocol.versions import Version
from tests.faults.synthetic import group_of
from weightsync.snapshot import TensorBytes, weights_digest

_START = bytes(16)


class ChainBackend:
    """Satisfies `consumer.backend.Backend`."""

    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int) -> None:
        self._lr = config.lr
        self._chain = _START
        self._steps = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._step = xxhash.xxh3_128()

    def accumulate(self, batch: ChunkBatch) -> None:
        size = len(batch.rewards) // max(1, len(batch.seqs))
        for i, (seq, group) in enumerate(zip(batch.seqs, batch.groups, strict=True)):
            self._step.update(_group(seq, group.tokens, batch.rewards[i * size : (i + 1) * size]))

    def finish_step(self, step: int, divisor: float) -> StepReport:
        assert step == self._steps + 1
        self._chain = _link(self._chain, int(self._rng.integers(1 << 62)), self._step.digest(), int(divisor))
        self._steps = step
        self.abandon_step()
        return StepReport(loss=0.0, grad_norm=0.0, lr=self._lr, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)

    def abandon_step(self) -> None:
        self._step = xxhash.xxh3_128()

    def snapshot(self) -> Mapping[str, TensorBytes]:
        return {"chain": TensorBytes(dtype="U8", shape=(16,), data=self._chain)}

    def capture(self) -> TrainingState:
        steps = TensorBytes(dtype="I64", shape=(1,), data=self._steps.to_bytes(8, "little"))
        return TrainingState(weights=self.snapshot(), optimizer={"step.chain": steps}, rng={"pcg64": json.dumps(self._rng.bit_generator.state).encode()})

    def restore(self, state: TrainingState) -> None:
        self._chain = bytes(state.weights["chain"].data)
        self._steps = int.from_bytes(state.optimizer["step.chain"].data, "little")
        self._rng.bit_generator.state = json.loads(state.rng["pcg64"])


def expected_digest(seed: int, line: Iterable[WitnessLine]) -> str:
    """Of the weights after the steps of `line`. Takes their groups by `seq` from `synthetic.group_of`, and nothing from the run but that."""
    chain, rng = _START, np.random.Generator(np.random.PCG64(seed))
    for one in line:
        step = xxhash.xxh3_128()
        for seq in one.seqs:
            rollouts = group_of(seq, [Version(1, 0)]).rollouts
            step.update(_group(seq, np.concatenate([one.tokens for one in rollouts]), [one.reward for one in rollouts]))
        chain = _link(chain, int(rng.integers(1 << 62)), step.digest(), one.tokens)
    return weights_digest({"chain": TensorBytes(dtype="U8", shape=(16,), data=chain)})


def _group(seq: int, tokens: np.ndarray, rewards: Iterable[float]) -> bytes:
    return xxhash.xxh3_128_digest(b"%d %b %b" % (seq, tokens.tobytes(), np.array(list(rewards)).tobytes()))


def _link(chain: bytes, drawn: int, step: bytes, tokens: int) -> bytes:
    return xxhash.xxh3_128_digest(b"%b %d %b %d" % (chain, drawn, step, tokens))
