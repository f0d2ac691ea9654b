from __future__ import annotations

import dataclasses
from pathlib import Path

import orjson
import pytest

from protocol.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from protocol.errors import ConfigError, DecodeError, IdentityMismatch, SchemaTooNew
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data\.path .*data\.jsonl: is empty"),
        ("\n \n", r"data\.path .*data\.jsonl: is empty"),
        ('{"prompt": "1"}\n{"prompt": \n', r"data\.jsonl:2: not valid JSON .*; correct or remove the line"),
        ('{"prompt": "1"}\n\n[1]\n', r"data\.jsonl:3: expected a JSON object, got list"),
    ],
)
def test_no_run_is_made_of_a_file_that_no_producer_can_read(files: Path, text: str, message: str) -> None:
    (files / "data.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        identity(files)


def test_an_identity_reads_back_and_ignores_what_a_newer_minor_schema_added(files: Path) -> None:
    facts = dataclasses.asdict(identity(files))
    assert RunIdentity.read(orjson.dumps(facts | {"arch": "x"}), run="r") == identity(files)


def test_a_run_of_a_newer_major_schema_says_so_whatever_else_it_holds() -> None:
    with pytest.raises(SchemaTooNew, match=r"run 'r' was created with schema 2\.x, this process reads up to 1\.x: upgrade rollstream here"):
        RunIdentity.read(orjson.dumps({"schema_major": 2, "arch": "x"}), run="r")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"schema_major": 1, "seed": "0"}'])
def test_what_is_no_identity_is_named(raw: bytes) -> None:
    with pytest.raises(DecodeError, match="identity of run 'r'"):
        RunIdentity.read(raw, run="r")
