"""Memory that is given back while somebody else computes where this engine does: weights and keys and values, each by its tag.

Called by the thread that decodes. Invariant: a tag is released or held. Weights come back as zeros, which only an update makes weights again.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from producer.engine.embedded.model import SlotModel

KV_CACHE, WEIGHTS = "kv_cache", "weights"
TAGS = (KV_CACHE, WEIGHTS, "cuda_graph")
"""SGLang's; there are no captured graphs here."""


class Memory:
    def __init__(self, model: SlotModel) -> None:
        self._model = model
        self._shapes: dict[torch.nn.Parameter, torch.Size] = {}
        self.released: set[str] = set()

    @torch.no_grad()
    def release(self, tags: Collection[str]) -> str | None:
        """What went wrong, or None. The caller has seen to it that nothing is computed."""
        if again := self.released & set(tags):
            return f"{', '.join(sorted(again))}: released already"
        if KV_CACHE in tags:
            self._model.cache.release()
        if WEIGHTS in tags:
            for parameter in self._model.model.parameters():
                self._shapes[parameter] = parameter.shape
                parameter.data = parameter.data.new_empty(0)
        self.released |= set(tags)
        return None

    @torch.no_grad()
    def resume(self, tags: Collection[str]) -> str | None:
        if strange := set(tags) - self.released:
            return f"{', '.join(sorted(strange))}: not released"
        if KV_CACHE in tags:
            self._model.cache.restore()
        if WEIGHTS in tags:
            for parameter in self._model.model.parameters():
                parameter.data = parameter.data.new_zeros(self._shapes.pop(parameter))
        self.released -= set(tags)
        return None
