"""Prompts to token ids, as the model's own tokenizer files say; no transformers, no torch.

Text is encoded as it is, with the special tokens the tokenizer itself adds. Chat messages are rendered by the model's chat template, which writes its special
tokens out, so none are added on top. Templates are somebody else's code: they run sandboxed and can reach neither files nor attributes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from protocol.errors import ConfigError
from protocol.messages import JsonValue

_LOG = logging.getLogger(__name__)

Prompt: TypeAlias = "str | list[dict[str, JsonValue]]"


class Decoder:
    """Sampled tokens to text as engines give it, and the tokens that end a response."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        """Empty: the model folder names none."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, without the special tokens unless asked for."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    @property
    def vocabulary(self) -> int:
        """Tokens, those that were added among them."""
        return int(self._tokenizer.get_vocab_size())


class PromptEncoder:
    """The tokenizer and the chat template of one model folder.

    Raises: `ConfigError` naming the file that cannot be used.
    """

    def __init__(self, model_path: str) -> None:
        folder = Path(model_path)
        if not folder.is_dir():
            raise ConfigError(f"model.path {model_path}: no such folder; give a folder with config.json, tokenizer.json and safetensors weights")
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise ConfigError(f"model.path {model_path}: has no tokenizer.json; save a fast tokenizer there")
        try:
            self._tokenizer = Tokenizer.from_file(str(source))
        except Exception as problem:
            raise ConfigError(f"{source}: not a tokenizer ({problem})") from problem
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        self._special = _special_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        self.decode = Decoder(self._tokenizer, _eos_ids(folder, self._tokenizer, self._special.get("eos_token")))
        if not self.decode.eos_ids:
            _LOG.warning(
                "model.path %s names no end-of-sequence token, so the last token of each response that an update aborts is sampled again: "
                "add eos_token_id to generation_config.json or config.json, or eos_token to tokenizer_config.json",
                model_path,
            )
        self._where, text = _template_text(folder, settings)
        self._template = _compile(self._where, text) if text is not None else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises: `ConfigError` saying why a chat prompt cannot be rendered."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt).ids)
        return list(self._tokenizer.encode(self.render(prompt), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Mapping[str, JsonValue]]) -> str:
        """Chat messages as the text the model expects, up to where it should answer."""
        if self._template is None:
            raise ConfigError(f"chat messages need a chat template, and {self._where} has none: add chat_template.jinja there, or give prompts as text")
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special))
        except (TemplateError, TypeError, ValueError, KeyError) as problem:
            raise ConfigError(f"the chat template of {self._where} refuses these messages ({problem})") from problem


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path}: not valid JSON ({problem})") from problem
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, …: plain strings, or objects that hold one."""
    found = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items() if name.endswith("_token")}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> frozenset[int]:
    """End-of-sequence tokens as engines collect them: of the model, of its generation settings and of the tokenizer."""
    named = [_read_json(folder / file).get("eos_token_id") for file in ("config.json", "generation_config.json")]
    named.append(None if eos_token is None else tokenizer.token_to_id(eos_token))
    flat = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in flat if isinstance(token, int) and not isinstance(token, bool))


def _template_text(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, str | None]:
    """The chat template and the file it came from; a list of named ones gives "default"."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own, own.read_text("utf-8")
    where, template = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(template, list):
        template = next((item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default"), None)
    return (where, template) if isinstance(template, str) else (folder, None)


def _compile(where: Path, text: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateError as problem:
        raise ConfigError(f"{where}: the chat template is not valid Jinja ({problem})") from problem


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:  # noqa: FBT001, FBT002, RUF100 - templates pass these by position
    """JSON as it is; Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote; for rendering it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that Jinja reads

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
