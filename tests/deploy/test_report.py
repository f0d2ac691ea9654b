from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from deploy import report
from deploy.history import History, read_history
from deploy.report import _BUCKETS, _average, _rate, plot
from protocol.errors import ConfigError
from tests.deploy.recorded import Recorder, small_run


@pytest.fixture(scope="module", autouse=True)
def no_fonts_stay_open() -> Iterator[None]:
    """matplotlib keeps the files of its fonts open for the life of the process."""
    yield
    if (fonts := sys.modules.get("matplotlib.font_manager")) is not None:
        fonts._get_font.cache_clear()


def test_a_picture_is_drawn_for_a_run_and_for_one_that_has_hardly_begun(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    short = Recorder()
    short.begin()
    short.trained(1, 1, [0], reward=0.5, staleness={"0": 1})
    for name, run in (("whole", small_run()), ("short", short)):
        path = plot(read_history(run.events), tmp_path / f"{name}.png", title=name)
        assert path.read_bytes().startswith(b"\x89PNG")


async def test_the_title_is_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    def note(_history: History, path: Path, *, title: str) -> Path:
        titles.append(title)
        return path

    monkeypatch.setattr(report, "plot", note)
    lines = [orjson.dumps({"id": event.id, "op": event.op, "d": event.fields}) + b"\n" for event in small_run().events]
    (tmp_path / "audit.jsonl").write_bytes(b"".join(lines))
    await report.draw(tmp_path)
    (tmp_path / "run.toml").write_text('[run]\nname = "sort"\n')
    await report.draw(tmp_path)
    assert titles == [tmp_path.name, "sort"]


def test_rates_and_averages_lose_nothing() -> None:
    seconds = 7.0
    width = seconds / _BUCKETS
    assert sum(_rate([(0.0, 5), (3.5, 7), (7.0, 9), (8.0, 1)], width, seconds)) * width == pytest.approx(21)
    averaged = _average([(-1.0, 2), (1.0, 4), (5.0, 0)], width, seconds)
    assert sum(averaged) * width == pytest.approx(2 * 1 + 4 * 4)
    assert (averaged[0], averaged[30], averaged[-1]) == (pytest.approx(2), pytest.approx(4), 0)


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"install `rollstream\[report\]`"):
        plot(History(), tmp_path / "report.png", title="run")
    assert not list(tmp_path.iterdir())
