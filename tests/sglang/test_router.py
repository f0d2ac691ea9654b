"""A router knows nothing of versions and of updates: what is behind it is told and judged without it."""

from __future__ import annotations

from producer.config import ProducerConfig
from producer.pool import _behind_router
from producer.routing import EVAL, Engine
from protocol.versions import Version


def engine(name: str, n: int, **changes: object) -> Engine:
    return Engine(key=(name, "b"), url=f"http://{name}", version=Version(1, n), **changes)  # type: ignore[arg-type]


def test_a_router_stands_for_the_least_that_is_behind_it():
    """A request that needs 1:4 must not go where the router may pick an engine at 1:3."""
    (router,) = _behind_router("http://router", [engine("a", 3), engine("b", 5, span_lag=1, prefix_cache=True)])
    assert (router.url, router.version, router.span_lag) == ("http://router", Version(1, 3), 1)
    assert (router.mixed, router.prefix_cache) == (True, False), "while they differ each request has a salt of its own"


def test_engines_of_the_evaluation_are_asked_past_it():
    asked = _behind_router("http://router", [engine("a", 3), engine("e", 2, fleet=EVAL)])
    assert [one.url for one in asked] == ["http://e", "http://router"]


def test_who_sets_a_router_reads_that_it_must_not_sample_twice():
    assert "--disable-retries" in str(ProducerConfig.model_fields["router_url"].description)
