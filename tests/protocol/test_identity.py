from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from protocol.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from protocol.errors import ConfigError, IdentityMismatch
from protocol.identity import RunIdentity, identify


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1"}\n')
    return tmp_path


def identity(files: Path, *, cut: str = "", seed: int = 0, group_size: int = 8) -> RunIdentity:
    return identify(
        RunConfig(name="r", seed=seed),
        ModelConfig(path=str(files / "model")),
        DataConfig(path=f"{files / 'data.jsonl'}{cut}"),
        RolloutConfig(group_size=group_size),
    )


def test_the_same_files_are_the_same_run_wherever_they_lie(files: Path, tmp_path: Path) -> None:
    first = identity(files)
    (tmp_path / "elsewhere").mkdir()
    for name in ("model", "data.jsonl"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    second = identity(tmp_path / "elsewhere")
    assert first == second
    first.check(second, run="r")


def test_every_part_of_the_identity_changes_it(files: Path) -> None:
    seen = [identity(files), identity(files, cut="[:10]"), identity(files, seed=1), identity(files, group_size=4)]
    (files / "model" / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(identity(files))
    (files / "data.jsonl").write_text('{"prompt": "2"}\n')
    seen.append(identity(files))
    assert len(set(seen)) == len(seen)


def test_a_mismatch_names_every_key_that_differs(files: Path) -> None:
    run = identity(files)
    joining = dataclasses.replace(run, group_size=4, dataset="other", schema_major=2)
    with pytest.raises(IdentityMismatch) as caught:
        run.check(joining, run="sort")
    message = str(caught.value)
    assert "run 'sort' was created with other settings" in message
    assert "rollout.group_size: the run has 8, this process 4" in message
    assert "data.path: the run has" in message
    assert "schema: the run has 1, this process 2" in message
    assert "seed" not in message


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("data.jsonl", "data.path .*data.jsonl: no such file"),
        ("model/tokenizer.json", "model.path .*model: has no tokenizer.json; save a fast tokenizer there"),
    ],
)
def test_a_missing_file_is_named_with_its_key(files: Path, gone: str, message: str) -> None:
    (files / gone).unlink()
    with pytest.raises(ConfigError, match=message):
        identity(files)


def test_a_missing_model_folder_is_named_with_its_key(files: Path) -> None:
    (files / "model").rename(files / "moved")
    with pytest.raises(ConfigError, match=r"model.path .*model: no such folder; give a folder with config.json"):
        identity(files)
