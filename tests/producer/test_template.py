from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producer.template import PromptEncoder
from protocol.errors import ConfigError

MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def with_template(model: Path, template: Any) -> PromptEncoder:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return PromptEncoder(str(model))


def test_text_is_encoded_with_the_tokenizer_s_own_special_tokens(model: Path) -> None:
    assert PromptEncoder(str(model)).encode("12") == [0, 3, 4]


def test_chat_is_rendered_up_to_the_answer_and_gets_no_special_tokens_on_top(model: Path) -> None:
    encoder = PromptEncoder(str(model))
    text = encoder.render(MESSAGES)
    assert text == "<s><system>be brief\n<user>1+1\n<assistant>"
    assert encoder.encode(MESSAGES).count(0) == 1


def test_a_chat_template_file_wins_and_a_named_list_gives_its_default(model: Path) -> None:
    encoder = with_template(model, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}yes"}])
    assert encoder.render(MESSAGES) == "</s>yes"
    (model / "chat_template.jinja").write_text("{{ messages | length }}")
    assert PromptEncoder(str(model)).render(MESSAGES) == "2"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "be brief"}'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "1+1"),
        ("{% if tools is none and not documents %}plain{% endif %}", "plain"),
        ("{% if strftime_now('%Y') | int > 2000 %}\n  now\n{% endif %}", "  now\n"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_what_templates_of_models_use_works(model: Path, template: str, expected: str) -> None:
    assert with_template(model, template).render(MESSAGES) == expected


def test_a_template_s_own_refusal_is_reported(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"refuses these messages \(no system role\)"):
        with_template(model, "{{ raise_exception('no system role') }}").render(MESSAGES)


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"])
def test_a_template_cannot_reach_out_of_its_sandbox(model: Path, template: str) -> None:
    with pytest.raises(ConfigError, match="refuses these messages"):
        with_template(model, template).render(list(MESSAGES))


def test_faults_of_the_model_folder_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path .*nowhere: no such folder"):
        PromptEncoder(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        PromptEncoder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: the chat template is not valid Jinja"):
        with_template(model, "{% if %}")
    with pytest.raises(ConfigError, match=r"chat messages need a chat template.*add chat_template\.jinja there"):
        with_template(model, None).encode(MESSAGES)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        PromptEncoder(str(model))
