from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from producer.engine.embedded.model import load


def test_models_load_whole_when_several_threads_load_at_once(model_a: Path) -> None:
    """Without the lock, every load of this test failed, and all later ones of the process."""
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: load(str(model_a), slots=2, max_length=32), range(8)))
    assert all(model.direct is not None for model in models)
