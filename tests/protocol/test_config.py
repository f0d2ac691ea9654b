from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, model_validator

from protocol.config import RedisConfig, RolloutConfig, RunConfig, Section, Tree, load, validate
from protocol.errors import ConfigError


class StopConfig(Section):
    """A section with a check across its keys."""

    steps: int = Field(0, ge=0, description="Stop after so many steps; 0: never.")
    seconds: float = Field(0.0, ge=0, description="Stop after so many seconds; 0: never.")

    @model_validator(mode="after")
    def _ends(self) -> StopConfig:
        if self.steps == 13:
            raise ValueError("steps 13 is unlucky: use 14")
        return self


class Daemon(Tree):
    run: RunConfig
    redis: RedisConfig = RedisConfig()
    rollout: RolloutConfig = RolloutConfig()
    stop: StopConfig = StopConfig()


GOOD = '[run]\nname = "sort"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def read(file: Path, text: str, *, sets: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> Daemon:
    file.write_text(text)
    return load(Daemon, file, sets=sets, environ=environ or {})


def refused(file: Path, text: str, *, sets: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> str:
    """The message, with the file's folder taken out."""
    with pytest.raises(ConfigError) as caught:
        read(file, text, sets=sets, environ=environ)
    return str(caught.value).replace(f"{file.parent}/", "")


def test_file_then_environment_then_set(file: Path) -> None:
    text = GOOD + "seed = 1\n[rollout]\ngroup_size = 2\ntemperature = 1\n"
    config = read(file, text, environ={"ROLLSTREAM__RUN__SEED": "2", "ROLLSTREAM__ROLLOUT__GROUP_SIZE": "3", "OTHER": "x"}, sets=("run.seed=4",))
    assert (config.run.seed, config.rollout.group_size, config.rollout.temperature) == (4, 3, 1.0)


@pytest.mark.parametrize(
    ("value", "text"), [("plain", "plain"), ('"quoted"', "quoted"), ("a=b", "a=b"), ("", ""), ("1\nseed = 9", "1\nseed = 9"), ("unix:///a b", "unix:///a b")]
)
def test_a_set_value_is_toml_or_else_text(file: Path, value: str, text: str) -> None:
    config = read(file, GOOD, sets=(f"redis.url={value}",))
    assert (config.redis.url, config.run.seed) == (text, 0)


def test_a_list_may_be_set(file: Path) -> None:
    assert read(file, GOOD, sets=('rollout.stop=["a", "b"]',)).rollout.stop == ("a", "b")


def test_sections_of_other_daemons_are_known_by_name_only(file: Path) -> None:
    assert read(file, GOOD + "[trainer]\nanything = [1, 2]\n").run.name == "sort"


def test_a_byte_order_mark_is_no_error(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(Daemon, file, environ={}).run.name == "sort"


def test_a_section_is_frozen(file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read(file, GOOD).run.seed = 3  # type: ignore[misc]


def test_the_folder_of_a_run_follows_its_name() -> None:
    assert RunConfig(name="sort").folder == Path("runs/sort").absolute()
    assert RunConfig(name="sort", dir="/data/x").folder == Path("/data/x")


BAD: list[tuple[str, str]] = [
    (GOOD + "sead = 1\n", "run.toml:3: unknown key run.sead; did you mean run.seed?"),
    (GOOD + "zzz = 1\n", "run.toml:3: unknown key run.zzz; known here: run.name, run.seed, run.dir"),
    (GOOD + "[rollouts]\n", "run.toml:3: unknown section [rollouts]; did you mean rollout?"),
    ("name = 1\n" + GOOD, "run.toml:1: unknown section [name]"),
    ("seed = 1\n", "run.toml:1: unknown section [seed]"),
    ("# empty\n", "run.toml: section [run] is missing: add it with name"),
    ("\n[run]\nseed = 1\n", "run.toml:2: run.name is missing: Name of the run"),
    ("[run]\nname = 3\n", "run.toml:2: run.name: got 3 (int); input should be a valid string. Name of the run"),
    (GOOD + 'seed = "1"\n', "run.toml:3: run.seed: got '1' (str); input should be a valid integer. Seeds"),
    (GOOD + "seed = true\n", "run.toml:3: run.seed: got True (bool)"),
    (GOOD + "seed = -1\n", "run.toml:3: run.seed: got -1 (int); input should be greater than or equal to 0"),
    (GOOD + "[redis]\nappendfsync = 'often'\n", "run.toml:4: redis.appendfsync: got 'often' (str); input should be 'always', 'everysec' or 'no'"),
    (GOOD + '[rollout]\n# group_size = 1\nstop = ["a", 2]\n', "run.toml:5: rollout.stop.1: got 2 (int)"),
    (GOOD + "[stop]\nseconds = 1\nsteps = 13\n", "run.toml:3: stop: steps 13 is unlucky: use 14"),
    ("run = 3\n", "run.toml:1: run: got 3 (int); expected a section: a line [run] with its keys below"),
    # however the key is written
    ('run.name = "sort"\nrun.sead = 1 # a typo\n', "run.toml:2: unknown key run.sead"),
    ('run = { name = "sort", sead = 1 }\n', "run.toml:1: unknown key run.sead"),
    ('["run"]\n"name" = "sort"\n"sead" = 1\n', "run.toml:3: unknown key run.sead"),
    ('  [ run ]  # here\n\tname="sort"\n\tsead=1\n', "run.toml:3: unknown key run.sead"),
    ('[redis]\nurl = """\n[run]\nseed = "x"\n"""\n' + GOOD + 'seed = "x"\n', "run.toml:8: run.seed: got 'x' (str)"),
    ("[rollout]\nstop = [\n  'a',\n  3,\n]\n" + GOOD, "run.toml:2: rollout.stop.1: got 3 (int)"),
    ("[trainer]\nx = [\n[1],\n]\nsead = 1\n" + GOOD + "sead = 1\n", "run.toml:8: unknown key run.sead"),
    ("[trainer.run]\nsead = 1\n" + GOOD + "\n# more\nsead = 1\n", "run.toml:7: unknown key run.sead"),
    # not TOML at all
    ("[run\n", "run.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 5)"),
    (GOOD + 'name = "again"\n', "run.toml: not valid TOML: Cannot overwrite a value (at line 3"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_file_names_line_key_and_cure(file: Path, text: str, message: str) -> None:
    assert message in refused(file, text)


def test_every_fault_of_a_file_is_reported_at_once(file: Path) -> None:
    lines = refused(file, GOOD + "sead = 1\n[rollout]\ngroup_size = 0\n").splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["run.toml:3:", "run.toml:5:"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("run.seed", "--set run.seed: expected section.key=value"),
        ("seed=1", "--set seed=1: expected section.key, got 'seed'"),
        ("run.a.b=1", "--set run.a.b=1: expected section.key, got 'run.a.b'"),
        (".seed=1", "--set .seed=1: expected section.key"),
        ("run.=1", "--set run.=1: expected section.key"),
        ("run.sead=1", "--set run.sead=1: unknown key run.sead; did you mean run.seed?"),
        ("run.seed=one", "--set run.seed=one: run.seed: got 'one' (str); input should be a valid integer"),
        ("ran.seed=1", "--set ran.seed=1: unknown section [ran]; did you mean run?"),
        ("run.name=2026", "--set run.name=2026: run.name: got 2026 (int); input should be a valid string"),
    ],
)
def test_a_bad_set_names_itself(file: Path, item: str, message: str) -> None:
    assert message in refused(file, GOOD, sets=(item,))


def test_a_number_for_a_text_key_says_how_to_quote_it(file: Path) -> None:
    assert refused(file, GOOD, sets=("run.name=2026",)).endswith("Put the value in double quotes inside the shell's own quotes to keep it text.")
    assert read(file, GOOD, sets=('run.name="2026"',)).run.name == "2026"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ROLLSTREAM__RUN__SEAD", "environment variable ROLLSTREAM__RUN__SEAD: unknown key run.sead"),
        ("ROLLSTREAM__RUN__SEED", "environment variable ROLLSTREAM__RUN__SEED: run.seed: got 'x' (str)"),
        ("ROLLSTREAM__RUN", "environment variable ROLLSTREAM__RUN: expected section.key, got 'run'"),
        ("ROLLSTREAM__", "environment variable ROLLSTREAM__: expected section.key, got ''"),
        ("ROLLSTREAM__ROUTE__X", "environment variable ROLLSTREAM__ROUTE__X: unknown section [route]"),
    ],
)
def test_a_bad_environment_names_its_variable(file: Path, name: str, message: str) -> None:
    assert message in refused(file, GOOD, environ={name: "x"})


def test_a_section_written_as_a_value_cannot_be_set_into(file: Path) -> None:
    assert refused(file, "run = 3\n", sets=("run.seed=1",)) == "--set run.seed=1: run is not a section"


def test_a_missing_file_says_what_to_give(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: cannot be read .*; give -c the path of a TOML file"):
        load(Daemon, file, environ={})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[run]\nname = '\xe4'\n"])
def test_a_file_that_is_no_text_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Daemon, file, environ={})


def test_values_without_a_file_name_their_source() -> None:
    with pytest.raises(ConfigError, match=r"^ledger: unknown key run\.sead"):
        validate(Daemon, {"run": {"name": "a", "sead": 1}}, source="ledger")


def test_every_key_of_the_shared_sections_has_its_help() -> None:
    for section in (RunConfig, RedisConfig, RolloutConfig):
        assert all(field.description for field in section.model_fields.values())
