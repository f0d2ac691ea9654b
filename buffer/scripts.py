"""The ledger's Lua scripts, each assembled of the parts it needs: functions are made anew at every call, so it carries no others.

lua/put.lua             -- requires: groups lineage ready      its first line
lua/parts/state.lua     first in every script
lua/parts/groups.lua …  in the order of their own first lines, each once
lua/count.lua           around it: what becomes of its answer (rule R1)
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from protocol.connection import Script

_PACKAGE, _BASE = "buffer", "state"
_REQUIRES = "-- requires:"


def ledger_script(name: str, flags: str = "", *, around: str = "count") -> Script:
    """`around` says what its call is: count, one that changes the ledger; fence, an attached trainer's; answer, one that only looks."""
    parts = [f"lua/parts/{part}.lua" for part in parts_of(f"lua/{name}.lua")]
    return Script(_PACKAGE, f"lua/{name}.lua", prelude=parts, epilogue=f"lua/{around}.lua", flags=flags)


def parts_of(file: str) -> list[str]:
    """What goes before `file`: each part after those it requires itself."""
    found = [_BASE]
    for part in requires(file):
        found += [one for one in (*parts_of(f"lua/parts/{part}.lua"), part) if one not in found]
    return found


@cache
def requires(file: str) -> tuple[str, ...]:
    """The parts that a file names in its first line."""
    first, _, _ = (resources.files(_PACKAGE) / file).read_text("utf-8").partition("\n")
    return tuple(first.removeprefix(_REQUIRES).split()) if first.startswith(_REQUIRES) else ()
