from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DecodeError
from protocol.versions import Fork, Lineage, Version

FAR = 12
"""Steps looked at by the naive model; fork steps stay below it."""


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    """A random tree of incarnations, seen from a random one of them."""
    forks = {1: Fork(0, 0)}
    for incarnation in range(2, draw(st.integers(1, 7)) + 1):
        forks[incarnation] = Fork(draw(st.integers(1, incarnation - 1)), draw(st.integers(0, FAR - 2)))
    return Lineage(forks, head=draw(st.integers(1, len(forks))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Lineage, Version]:
    lineage = draw(lineages())
    return lineage, Version(draw(st.integers(1, len(lineage.forks))), draw(st.integers(0, FAR)))


def history(lineage: Lineage, version: Version) -> list[Version]:
    """Every set of weights from 0 to `version`, each under the incarnation that made it. Naive: one step back at a time."""
    incarnation, n = version
    made = []
    while n >= 0:
        while (fork := lineage.forks[incarnation]).parent and n <= fork.step:
            incarnation = fork.parent
        made.append(Version(incarnation, n))
        n -= 1
    return made[::-1]


@given(cases())
def test_shared_is_the_newest_common_ancestor(case: tuple[Lineage, Version]) -> None:
    lineage, version = case
    own = history(lineage, Version(lineage.head, FAR + 1))
    assert lineage.shared(version) == max(made.n for made in history(lineage, version) if made in own)


@given(cases())
def test_a_version_is_contained_when_the_head_went_through_it(case: tuple[Lineage, Version]) -> None:
    lineage, version = case
    own = history(lineage, Version(lineage.head, FAR + 1))
    on_the_line = version.incarnation in lineage.limits()
    assert lineage.contains(version) == (on_the_line and history(lineage, version)[-1] in own)


@given(cases(), st.integers(0, 5))
def test_staleness_counts_the_steps_since_the_shared_version(case: tuple[Lineage, Version], ahead: int) -> None:
    lineage, version = case
    shared = lineage.shared(version)
    assert lineage.staleness(version, shared + 1 + ahead) == ahead


@given(lineages(), st.integers(0, FAR), st.integers(0, FAR))
def test_staleness_of_the_head_s_own_past_is_never_negative(lineage: Lineage, n: int, later: int) -> None:
    assert lineage.staleness(Version(lineage.head, n), step=n + 1 + later) == later


@given(cases())
def test_a_token_of_the_future_is_a_bug_and_not_clipped(case: tuple[Lineage, Version]) -> None:
    lineage, version = case
    with pytest.raises(ValueError, match="has staleness -1"):
        lineage.staleness(version, lineage.shared(version))


def test_the_example_of_rule_v1() -> None:
    lineage = Lineage({1: Fork(0, 0), 2: Fork(1, 7)}, head=2)
    assert lineage.shared(Version(1, 9)) == 7
    assert lineage.staleness(Version(1, 9), step=11) == 3
    assert lineage.contains(Version(1, 7))
    assert not lineage.contains(Version(1, 8))


def test_the_head_of_a_cousin_shares_only_the_common_grandparent() -> None:
    forks = {1: Fork(0, 0), 2: Fork(1, 7), 3: Fork(1, 5), 4: Fork(3, 9)}
    assert Lineage(forks, head=4).shared(Version(2, 20)) == 5
    assert Lineage(forks, head=2).shared(Version(4, 20)) == 5


def test_a_fork_from_before_the_parent_s_own_fork_lies_on_the_grandparent() -> None:
    lineage = Lineage({1: Fork(0, 0), 2: Fork(1, 7), 3: Fork(2, 4)}, head=3)
    assert lineage.limits() == {3: None, 2: 4, 1: 4}
    assert not lineage.contains(Version(1, 5))


def test_before_the_first_attach_nothing_is_contained() -> None:
    empty = Lineage({}, head=0)
    assert empty.limits() == {}
    assert not empty.contains(Version(1, 0))
    with pytest.raises(DecodeError, match="incarnation 1 is not one of this run's"):
        empty.shared(Version(1, 0))


@pytest.mark.parametrize("head", [1, 2, 3])
@pytest.mark.parametrize(
    "forks",
    [
        {1: Fork(1, 0)},
        {1: Fork(2, 0), 2: Fork(1, 0), 3: Fork(2, 0)},
        {1: Fork(3, 5), 2: Fork(3, 5), 3: Fork(1, 5)},
        {1: Fork(-1, 0), 2: Fork(1, 0), 3: Fork(1, 0)},
        {1: Fork(0, -4), 2: Fork(1, 0), 3: Fork(2, 0)},
    ],
)
def test_a_fork_table_that_is_no_tree_is_refused(forks: dict[int, Fork], head: int) -> None:
    with pytest.raises(DecodeError, match=r"forks|is not one of this run's"):
        Lineage(forks, head).shared(Version(2, 3))


@given(st.dictionaries(st.integers(-2, 5), st.builds(Fork, st.integers(-2, 5), st.integers(-2, 5)), max_size=6), st.integers(-2, 6), st.integers(-2, 6))
def test_a_hostile_fork_table_ends_in_an_answer_or_an_error(forks: dict[int, Fork], head: int, incarnation: int) -> None:
    with contextlib.suppress(DecodeError):
        assert isinstance(Lineage(forks, head).shared(Version(incarnation, 3)), int)


def test_two_roots_share_nothing() -> None:
    with pytest.raises(DecodeError, match="1:3 shares no version with incarnation 2"):
        Lineage({1: Fork(0, 0), 2: Fork(0, 0)}, head=2).shared(Version(1, 3))


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_version_reads_back_from_its_text(incarnation: int, n: int) -> None:
    assert Version.parse(str(Version(incarnation, n))) == (incarnation, n)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1",
        "1:",
        ":1",
        "1:2:3",
        "-1:2",
        "1:-2",
        "+1:2",
        " 1:2",
        "1:2\n",
        "01:2",
        "1:02",
        "1_0:2",
        "１:2",
        "1.0:2",
        "default",
        "boot:3f2a",
        "1:2147483648",
        "1:" + "9" * 5000,
    ],
)
def test_any_other_text_is_no_version(text: str) -> None:
    with pytest.raises(DecodeError, match='expected "incarnation:n"') as caught:
        Version.parse(text)
    assert len(str(caught.value)) < 150


def test_versions_are_ordered_by_incarnation_first() -> None:
    assert Version(2, 3) > Version(1, 9) > Version(1, 8)
