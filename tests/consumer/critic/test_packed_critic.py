"""A critic on packed rows: the values, gradients and steps of padded ones, and refused where it would not be so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from consumer.batch import ChunkBatch, step_divisor
from consumer.critic.actor_critic import ActorCritic
from consumer.packed_attention import Sequences, attend
from consumer.packing import PackedBatch
from consumer.token_advantages import numbered
from protocol.errors import ConfigError

Make = Callable[..., ActorCritic]
Chunks = Callable[..., list[ChunkBatch]]


def valued(backend: ActorCritic, batch: ChunkBatch, *, packed: bool) -> np.ndarray[Any, Any]:
    """By place in the chunk."""
    critic = backend._critic.backend
    found = np.full(batch.tokens, np.nan)
    parts = list(critic.cut(numbered(batch)))
    assert len(parts) > 1
    for part in parts:
        assert isinstance(part, PackedBatch) is packed
        with torch.no_grad():
            found[part.age] = critic.values(part).numpy()
    return found


def test_packed_rows_have_the_values_and_steps_of_padded_ones(make: Make, chunks: Chunks):
    (batch,) = chunks(12)
    critic = {"epochs": 2, "value_clip": 0.1, "lam": 0.9}
    padded, packed = (make(**critic, trainer={"packing": packing, "micro_batch_tokens": 48}) for packing in ("off", "on"))
    for step in (1, 2, 3):
        reports = []
        for backend in (padded, packed):
            backend.accumulate(batch)
            reports.append(backend.finish_step(step, step_divisor([batch])))
        assert reports[1].diagnostics == pytest.approx(dict(reports[0].diagnostics), rel=1e-3, abs=1e-5)
    values = [valued(backend, batch, packed=backend is packed) for backend in (padded, packed)]
    assert values[0].std() > 0.05
    np.testing.assert_allclose(values[1], values[0], atol=1e-4)
    one, other = (backend.capture().others for backend in (padded, packed))
    for group, tensors in one.items():
        for name, held in tensors.items():
            np.testing.assert_allclose(
                np.frombuffer(other[group][name].data, np.float32), np.frombuffer(held.data, np.float32), rtol=1e-3, atol=2e-5, err_msg=name
            )


def test_recomputed_layers_and_bfloat16_train_packed(make: Make, chunks: Chunks):
    backend = make(trainer={"packing": "on", "dtype": "bfloat16", "activation_checkpointing": True})
    for batch in chunks(6):
        backend.accumulate(batch)
    report = backend.finish_step(1, step_divisor(chunks(6)))
    assert np.isfinite(list(report.diagnostics.values())).all()
    assert report.diagnostics["critic_grad_norm"] > 0


def test_a_critic_that_packed_rows_would_change_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch):
    """An attention over the whole row, for the critic alone: a value has no softmax under which one could hide."""
    from consumer.critic import value_backend

    def over_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, *, scale: float | None = None) -> torch.Tensor:
        return attend(query, key, value, Sequences(ends=sequences.ends, lengths=(sum(sequences.lengths),)), scale=scale)

    inner = value_backend.use_packed_rows

    def tried(*given: Any) -> bool:
        with monkeypatch.context() as patched:
            patched.setattr("consumer.packed_attention.attend", over_all)
            return inner(*given)

    monkeypatch.setattr(value_backend, "use_packed_rows", tried)
    with pytest.raises(ConfigError, match=r"packing on: ValueModel does not train on packed rows \(its predictions differ by \d"):
        make(trainer={"packing": "on"})
