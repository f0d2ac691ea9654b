"""Things of the user's own, named in the configuration as `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError


def load_dotted(key: str, dotted: str, *, define: str) -> Any:
    """What the configuration's `key` names by `dotted`; modules of the working directory are found too. Imports its module.

    `define`: what is to stand there, for the message.
    Raises: `ConfigError` naming `key`.
    """
    module_name, _, name = dotted.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise ConfigError(f"{key} {dotted}: cannot import {module_name} ({type(problem).__name__}: {problem}); correct the path or the module") from problem
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{key} {dotted}: {module_name} has no {name}; define `{define}` there")
    return found
