from __future__ import annotations

from protocol.versions import Version
from weightsync.kinds import Kinds, layout_of
from weightsync.snapshot import TensorBytes

LAYOUT = ("w",)


def run(kinds: Kinds, versions: list[Version], *, worth: bool = True) -> list[str | None]:
    """The parent that each version got; all of them are in the store. `worth`: a delta is written where one is asked for."""
    found: list[str | None] = []
    for version in versions:
        parent = kinds.parent(version, kinds.chain, LAYOUT)
        found.append(None if parent is None else str(parent))
        kinds.published(version, "delta" if parent is not None and worth else "full", LAYOUT, tried=parent is not None)
    return found


def of(incarnation: int, *steps: int) -> list[Version]:
    return [Version(incarnation, n) for n in steps]


def test_the_first_and_every_nth_are_whole():
    assert run(Kinds(4), of(1, *range(9))) == [None, "1:0", "1:1", "1:2", None, "1:4", "1:5", "1:6", None]
    assert run(Kinds(1), of(1, 0, 1, 2)) == run(Kinds(0), of(1, 0, 1, 2)) == [None] * 3


def test_a_delta_applies_to_what_was_published_before_whatever_was_skipped():
    assert run(Kinds(9), of(1, 0, 3, 7)) == [None, "1:0", "1:3"]


def test_the_first_of_an_incarnation_is_whole():
    assert run(Kinds(9), [*of(1, 0, 1), *of(2, 1, 2)]) == [None, "1:0", None, "2:1"]


def test_a_missing_parent_or_another_layout_makes_it_whole():
    kinds = Kinds(9)
    run(kinds, of(1, 0, 1, 2))
    assert kinds.parent(Version(1, 3), of(1, 0, 1, 2), LAYOUT) == Version(1, 2)
    for there in (of(1, 1, 2), of(1, 0, 2), of(1, 0, 1), []):
        assert kinds.parent(Version(1, 3), there, LAYOUT) is None
    assert kinds.parent(Version(1, 3), kinds.chain, ("w", "v")) is None
    assert kinds.parent(Version(1, 2), kinds.chain, LAYOUT) is None, "a version is not made from itself"


def test_deltas_that_are_not_worth_it_are_tried_ever_less_often():
    kinds = Kinds(9)
    tried = [parent is not None for parent in run(kinds, of(1, *range(12)), worth=False)]
    assert [n for n, one in enumerate(tried) if one] == [1, 3, 6, 11]
    assert run(kinds, of(1, *range(12, 23)))[-3:] == ["1:19", "1:20", "1:21"], "and again once one was worth it"


def test_a_layout_is_names_types_and_shapes():
    tensor = TensorBytes(dtype="F32", shape=(2,), data=bytes(8))
    assert layout_of({"a": tensor, "b": tensor}) == layout_of({"b": tensor, "a": TensorBytes(dtype="F32", shape=(2,), data=b"12345678")})
    for other in (
        {"a": tensor},
        {"a": tensor, "b": TensorBytes(dtype="I32", shape=(2,), data=bytes(8))},
        {"a": tensor, "b": TensorBytes(dtype="F32", shape=(2, 1), data=bytes(8))},
    ):
        assert layout_of(other) != layout_of({"a": tensor, "b": tensor})
