from __future__ import annotations

import pytest

from producer.engine.sglang.figures import Sample, capacity, parse
from protocol.errors import DecodeError

ONE = """
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0",model_name="m"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{tp_rank="0",model_name="m"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{tp_rank="0",model_name="m"} 0.25
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 10.0
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{mode="decode",model_name="m"} 40.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m"} 7.0
# TYPE sglang:scheduler_idle_seconds_total counter
sglang:scheduler_idle_seconds_total{model_name="m"} 12.5
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.0
"""


def test_what_a_server_tells_of_itself():
    assert parse(ONE) == Sample(running=3, queued=2, generated_tokens=40, kv_usage=0.25, idle_s=12.5, told=True, sign=(40.0, 10.0, 47.0, 0.0, 0.0))


def test_loads_of_replicas_are_summed_and_the_fullest_cache_counts():
    two = ONE.replace('sglang:num_queue_reqs{tp_rank="0"', 'sglang:num_queue_reqs{dp_rank="1"')
    two += 'sglang:num_running_reqs{dp_rank="1"} 4.0\nsglang:token_usage{dp_rank="1"} 0.5\nsglang:scheduler_idle_seconds_total{dp_rank="1"} 7.5\n'
    found = parse(two)
    assert (found.running, found.kv_usage, found.idle_s) == (7, 0.5, 10.0)


def test_who_waits_for_the_half_that_reads_its_prompt_waits():
    text = ONE + 'sglang:num_decode_prealloc_queue_reqs{a="b"} 4.0\nsglang:num_decode_transfer_queue_reqs{a="b"} 1.0\n'
    assert parse(text).queued == 7


def test_a_token_that_is_not_finished_counts_for_progress():
    assert parse(ONE).sign != parse(ONE.replace("} 40.0", "} 41.0")).sign


@pytest.mark.parametrize("text", ["", "# nothing here\n", "other_metric 3\n"])
def test_one_that_tells_nothing_is_never_known_to_be_idle(text: str):
    assert parse(text) == Sample(sign=(0.0,) * 5)
    assert not parse(text).told


@pytest.mark.parametrize("text", ["<html>no</html>", "sglang:num_running_reqs{ 3", "sglang:num_running_reqs three"])
def test_garbage_is_a_decode_error(text: str):
    with pytest.raises(DecodeError, match="/metrics"):
        parse(text)


@pytest.mark.parametrize(
    ("about", "requests"),
    [
        ({"internal_states": [{"effective_max_running_requests_per_dp": 64}], "dp_size": 1, "max_running_requests": 999}, 64),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 64}], "dp_size": 4}, 256),
        ({"internal_states": [{}], "max_running_requests": 12}, 12),
        ({"max_running_requests": None}, 0),
        ({"internal_states": "?"}, 0),
    ],
)
def test_how_many_requests_it_decodes_at_once(about: dict[str, object], requests: int):
    assert capacity(about) == requests
