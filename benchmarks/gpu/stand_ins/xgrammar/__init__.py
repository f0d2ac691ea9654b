"""Stand-in for xgrammar: its classes are types of fields that SGLang's request models declare. Servers run with `--grammar-backend none`."""

from __future__ import annotations

from typing import Any

from absent import served
from pydantic import BaseModel, ConfigDict

__version__ = "0.2.1"


class _Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


_class = served("xgrammar", _Anything)


def __getattr__(name: str) -> Any:
    if name.islower():
        raise AttributeError(name)
    return _class(name)
