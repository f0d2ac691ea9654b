from __future__ import annotations

from pathlib import Path

import pytest

from buffer.recording import RecordingAbout
from buffer.storage import Storage, claim_storage, open_storage
from protocol.errors import ConfigError, RunExists

from .conftest import IDENTITY, settings
from .recorded import a_step


def about(run: str = "demo") -> RecordingAbout:
    return RecordingAbout(run=run, identity=IDENTITY, settings=settings())


def test_a_run_without_stores_has_none() -> None:
    assert open_storage(settings(), "demo") == Storage(spill=None, blobs=None)


def test_runs_that_share_a_spill_folder_do_not_meet(tmp_path: Path) -> None:
    config = settings(spill=f"{tmp_path}/spill/", blobs=f"file://{tmp_path}/blobs")
    one, other = open_storage(config, "one"), open_storage(config, "other")
    for storage, run in ((one, "one"), (other, "other")):
        claim_storage(storage, about(run))
    assert one.spill is not None
    assert other.spill is not None
    one.spill.write_step(a_step(1))
    assert (one.spill.steps(), other.spill.steps()) == ([1], [])
    assert one.spill.about().run == "one"
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "blobs/one/claimed",
        "blobs/other/claimed",
        "spill/one/about.json",
        "spill/one/steps/000000/000000001-000001",
        "spill/other/about.json",
    ]


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_storage(settings(spill=f"{tmp_path}/spill", blobs=f"{tmp_path}/blobs"), "demo")
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_does_not_write_into_the_recording_of_an_earlier_one(tmp_path: Path) -> None:
    storage = open_storage(settings(spill=str(tmp_path)), "demo")
    claim_storage(storage, about())
    claim_storage(storage, about())  # a kill before the run was made leaves no more than this
    assert storage.spill is not None
    storage.spill.write_step(a_step(1))
    claim_storage(storage, None)
    with pytest.raises(RunExists, match=r"holds 1 steps of an earlier run: use another run.name or buffer.spill, or move it away"):
        claim_storage(storage, about())


@pytest.mark.parametrize(("key", "mark"), [("spill", "about.json"), ("blobs", "claimed")])
def test_a_run_goes_on_only_where_its_stores_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, mark: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    claim_storage(open_storage(settings(**{key: "store"}), "demo"), about())
    claim_storage(open_storage(settings(**{key: "store"}), "demo"), None)
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ConfigError, match=rf"buffer\.{key} of the run is not here: there is no {tmp_path}/there/store/demo/{mark}\..*started in"):
        claim_storage(open_storage(settings(**{key: "store"}), "demo"), None)
    assert not (tmp_path / "there" / "store").exists()
    (tmp_path / "there" / "store" / "demo").mkdir(parents=True)
    (tmp_path / "there" / "store" / "demo" / mark).touch()
    claim_storage(open_storage(settings(**{key: "store"}), "demo"), None)


@pytest.mark.parametrize("key", ["spill", "blobs"])
def test_a_store_that_refuses_is_told_by_its_key(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = open_storage(settings(**{key: f"{tmp_path}/file"}), "demo")
    with pytest.raises(ConfigError, match=rf"buffer\.{key}: .*(Not a directory|File exists).*{tmp_path}/file/demo"):
        claim_storage(storage, about())
    with pytest.raises(ConfigError, match=rf"buffer\.{key} nope://x"):
        open_storage(settings(**{key: "nope://x"}), "demo")
