"""The KV cache of a fixed number of slots, as a transformers `Cache`.

One pair of tensors a layer, [slots, kv_heads, max_length, head_dim], allocated once. The requests being decoded occupy slots 0 .. n-1 without holes, so every
forward pass works on views and gathers nothing: a request that leaves is overwritten by the last one (`move`).

Invariant: position j of a slot holds the key and value of token j of its request; whatever lies behind a request's length is finite and is masked out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]  # transformers types its own classes only in part
    """The model calls `update` once a layer; `prefill` and `decode` say beforehand where the new keys and values go."""

    def __init__(self, *, layers: int, slots: int, kv_heads: int, max_length: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self._layers, self._shape, self._dtype = layers, (slots, kv_heads, max_length, head_dim), dtype
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.restore()
        self._first = 0
        self._source: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._width = 0

    def prefill(self, first: int, source: torch.Tensor) -> None:
        """The next forward pass computes distinct prompts; slot `first + i` receives the keys and values of its row `source[i]`."""
        self._first, self._source = first, source

    def decode(self, positions: torch.Tensor, width: int) -> None:
        """The next forward pass computes one token for each slot 0 .. n-1, token `positions[i]` of its request; it sees the first `width` positions."""
        self._source = None
        self._rows, self._positions, self._width = torch.arange(len(positions)), positions, width

    def move(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of the slots `source` into the slots `target`."""
        for held in (*self._keys, *self._values):
            held[target, :, :width] = held[source, :, :width]

    def scrub(self, slot: int) -> None:
        """Zero a slot: what is not finite spoils an answer even from behind the mask."""
        for held in (*self._keys, *self._values):
            held[slot].zero_()

    def release(self) -> None:
        """Give the memory back. Until `restore` nothing may be computed."""
        self._keys, self._values = [], []

    def restore(self) -> None:
        """Memory for every slot, empty."""
        self._keys, self._values = ([torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._layers)] for _ in range(2))

    def clear(self) -> None:
        for held in (*self._keys, *self._values):
            held.zero_()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._source is not None:
            rows, width = slice(self._first, self._first + len(self._source)), key_states.shape[2]
            keys[rows, :, :width] = key_states[self._source]
            values[rows, :, :width] = value_states[self._source]
            return key_states, value_states
        assert self._rows is not None
        assert self._positions is not None
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        n = len(self._rows)
        return keys[:n, :, : self._width], values[:n, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature is transformers'
        """Not used: positions and masks are given to the model explicitly."""
        return 0
