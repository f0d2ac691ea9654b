from __future__ import annotations

import inspect
import re

from protocol import errors
from protocol.errors import DecodeError, PayloadLost, RollstreamError


def declared() -> dict[str, type[RollstreamError]]:
    return {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, RollstreamError)}


def drawn() -> dict[str, str]:
    """Name of each error in the drawing → name of its parent."""
    parents: dict[str, str] = {}
    line: list[str] = []
    for text in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│├└─ ]{4})*)([A-Z]\w+(?: / [A-Z]\w+)*)(?:  |$)", text)
        if match is None:
            continue
        depth = len(match[1]) // 4
        for name in match[2].split(" / "):
            parents[name] = line[depth - 1] if depth else "Exception"
            line[depth:] = [name]
    return parents


def test_the_drawing_is_the_tree() -> None:
    assert drawn() == {name: cls.__bases__[0].__name__ for name, cls in declared().items()}


def test_the_drawing_tells_the_exit_codes() -> None:
    codes = {match[1]: int(match[2]) for match in re.finditer(r"(\w+) .*exit (\d+)", errors.__doc__ or "")}
    assert codes == {"RollstreamError": 1, "ConfigError": 2, "Unavailable": 75, "SchemaTooNew": 2, "Fenced": 3, "LedgerRegressed": 75, "Superseded": 3}
    for name, code in codes.items():
        assert declared()[name].exit_code == code


def test_every_error_says_when_it_is_raised() -> None:
    assert all(cls.__doc__ for cls in declared().values())


def test_errors_with_a_place_keep_it() -> None:
    assert (DecodeError("lengths", "negative").field, str(DecodeError("lengths", "negative"))) == ("lengths", "lengths: negative")
    assert (PayloadLost(7, "gone").seq, str(PayloadLost(7, "gone"))) == (7, "payload of group 7: gone")
