from __future__ import annotations

import json
from pathlib import Path

import pytest

from producer.config import RewardConfig
from producer.rewards import make_grader
from producer.source import PromptSet, PromptSource, read_rows
from producer.template import PromptEncoder
from protocol.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from protocol.data_path import split_data_path
from protocol.errors import ConfigError, DecodeError
from protocol.identity import RunIdentity, identify

LABELLED = make_grader(RewardConfig(kind="exact_match")).label_fault  # type: ignore[arg-type]
NUMERIC = make_grader(RewardConfig(kind="numeric_match")).label_fault  # type: ignore[arg-type]
GOOD = '{"prompt": "1+1=", "label": "2"}'


def write(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "1+1="', "rows.jsonl:2: not valid JSON"),
        ("[1, 2]", "rows.jsonl:2: expected a JSON object, got list"),
        ('{"question": "1+1=", "label": "2"}', 'rows.jsonl:2: has no "prompt": add it, or set data.prompt_key to one of question, label'),
        ('{"prompt": "", "label": "2"}', 'rows.jsonl:2: "prompt" is empty'),
        ('{"prompt": 7, "label": "2"}', 'rows.jsonl:2: "prompt" must be text or a list of chat messages, got int'),
        ('{"prompt": [], "label": "2"}', 'rows.jsonl:2: "prompt" must be text or a list of chat messages, got an empty list'),
        ('{"prompt": [{"role": "user"}], "label": "2"}', 'rows.jsonl:2: "prompt" message 0 must be an object with "role" and "content"'),
        ('{"prompt": "1+1="}', 'rows.jsonl:2: "label" is missing, and reward.kind exact_match needs it'),
        ('{"prompt": "1+1=", "label": {"x": 1}}', 'rows.jsonl:2: "label" is not text or a number'),
        ('{"prompt": "1+1=", "label": "2", "metadata": 3}', 'rows.jsonl:2: "metadata" must be an object, got int'),
    ],
)
def test_a_faulty_line_is_named_with_what_to_do(tmp_path: Path, line: str, expected: str) -> None:
    spec = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ConfigError) as refused:
        read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_faulty_line_is_named_up_to_ten(tmp_path: Path) -> None:
    spec = write(tmp_path, *["{"] * 12)
    with pytest.raises(ConfigError) as refused:
        read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED)
    lines = str(refused.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "… and 2 more lines"


def test_a_label_without_a_number_is_no_label_for_numbers(tmp_path: Path) -> None:
    spec = write(tmp_path, '{"prompt": "a", "label": "two"}')
    with pytest.raises(ConfigError, match=r'"label" holds no number, and reward\.kind numeric_match needs it'):
        read_rows("data.path", spec, DataConfig(path=spec), label_fault=NUMERIC)


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_an_empty_data_set_is_an_error(tmp_path: Path, lines: tuple[str, ...]) -> None:
    spec = write(tmp_path, *lines)
    with pytest.raises(ConfigError, match=r"data\.path .*rows\.jsonl: the file has no rows"):
        read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED)


def test_a_missing_file_is_named_by_key_and_path() -> None:
    with pytest.raises(ConfigError, match=r"eval\.path nowhere\.jsonl: cannot be read \(No such file or directory\)"):
        read_rows("eval.path", "nowhere.jsonl", DataConfig(path="x"), label_fault=LABELLED)


@pytest.mark.parametrize(
    ("cut", "lines"),
    [
        ("", [1, 2, 3, 5, 6, 7]),
        ("[:3]", [1, 2, 3]),
        ("[2:]", [3, 5, 6, 7]),
        ("[::2]", [1, 3, 6]),
        ("[-3:]", [5, 6, 7]),
        ("[1:-1:2]", [2, 5]),
        ("[ 1 : 4 ]", [2, 3, 5]),
    ],
)
def test_a_slice_selects_rows_as_in_python_and_keeps_their_lines(tmp_path: Path, cut: str, lines: list[int]) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": str(i), "label": "x"}) + ("\n" if i == 2 else "") for i in range(6)))
    rows = read_rows("data.path", path + cut, DataConfig(path=path + cut), label_fault=LABELLED)
    assert [row.line for row in rows] == lines


@pytest.mark.parametrize("cut", ["[a:b]", "[3]", "[1:2:0]", "[1:2:-1]", "[1:2:3:4]", "[]"])
def test_what_is_no_slice_is_refused_by_key(cut: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path rows\.jsonl.*is not a slice; use \[start:stop\]"):
        split_data_path("data.path", f"rows.jsonl{cut}")


def test_brackets_in_a_folder_name_are_no_slice_for_rows_and_identity(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "[v2]"
    folder.mkdir()
    spec = write(folder, GOOD, GOOD)
    whole, half = (_identity(spec + cut, model).dataset for cut in ("", "[:1]"))
    assert half == whole + "[:1]"
    assert len(read_rows("data.path", spec + "[:1]", DataConfig(path=spec + "[:1]"), label_fault=LABELLED)) == 1
    assert split_data_path("data.path", spec + "[:1]").file == split_data_path("data.path", spec).file == Path(spec)


def _identity(spec: str, model: Path) -> RunIdentity:
    return identify(RunConfig(name="r"), ModelConfig(path=str(model)), DataConfig(path=spec), RolloutConfig())


def test_a_slice_of_nothing_says_so(tmp_path: Path) -> None:
    spec = write(tmp_path, GOOD) + "[5:]"
    with pytest.raises(ConfigError, match="the slice selects no row"):
        read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED)


def test_a_prompt_over_the_limit_is_named_by_line(tmp_path: Path, model: Path) -> None:
    spec = write(tmp_path, GOOD, '{"prompt": "1234567890", "label": "2"}')
    rows = read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: the prompt has 11 tokens, over 10: shorten it or raise rollout\.max_prompt_tokens"):
        PromptSet("data.path", spec, rows, PromptEncoder(str(model)), max_tokens=10)
    assert PromptSet("data.path", spec, rows, PromptEncoder(str(model)), max_tokens=11).longest == 11


def test_a_source_gives_each_seq_its_row_and_a_bound_prompt_wins(tmp_path: Path, model: Path) -> None:
    spec = write(tmp_path, *(json.dumps({"prompt": str(i) * (i + 1), "label": str(i), "metadata": {"i": i}}) for i in range(5))) + "[1:]"
    encoder = PromptEncoder(str(model))
    prompts = PromptSet("data.path", spec, read_rows("data.path", spec, DataConfig(path=spec), label_fault=LABELLED), encoder, max_tokens=100)
    source = PromptSource(prompts, seed=3)
    chosen = [source.choose(seq) for seq in range(4)]
    assert {c.prompt_id for c in chosen} == {f"rows.jsonl:{line}" for line in range(2, 6)}
    for c in chosen:
        assert c.ids.tolist() == encoder.encode(c.row.prompt)
        assert c.row.metadata == {"i": int(str(c.row.label))}
    assert source.choose(0, bound="rows.jsonl:4").row.line == 4
    for unknown in ("rows.jsonl:1", "other.jsonl:4", "rows.jsonl"):
        with pytest.raises(DecodeError, match="names no row"):
            source.choose(0, bound=unknown)
