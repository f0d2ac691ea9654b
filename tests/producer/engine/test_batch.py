from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from producer.engine.embedded import weights
from producer.engine.embedded.answer import spans
from producer.engine.embedded.batch import Batch
from producer.engine.embedded.model import SlotModel, load
from producer.engine.embedded.request import Limits, Request, parse

from .conftest import FAMILIES, full_logprobs, write_model, written_logprobs


def request(model: SlotModel, ids: list[int], *, options: dict[str, Any] | None = None, **params: Any) -> Request:
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True} | params} | (options or {})
    (made,), _ = parse(body, Limits(context_length=model.max_length, vocabulary=model.geometry.vocabulary, tokenizer=model.tokenizer))
    return made


def finish(batch: Batch) -> list[Request]:
    done: list[Request] = []
    while batch.requests:
        done += batch.step()
    return done


def reference(path: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def assert_own_logprobs(made: Request, model: torch.nn.Module) -> None:
    expected = written_logprobs(model, made.ids, made.output, temperature=made.sampling.temperature)
    torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_models_own_while_requests_join_and_leave(family: str, direct: bool, tmp_path: Path):
    path = write_model(tmp_path / family, seed=3, family=family)
    model, rng = load(str(path), slots=6, max_length=64), random.Random(0)
    assert model.direct is not None
    if not direct:
        model.direct = None
    batch, waiting, done = Batch(model, seed=0), [], []
    for _ in range(40):
        ids = [rng.randrange(21) for _ in range(rng.randint(1, 20))]
        waiting.append(request(model, ids, max_new_tokens=rng.randint(1, 30), temperature=rng.choice([1.0, 1.0, 0.7, 1.5])))
    submitted = list(waiting)
    while waiting or batch.requests:
        count = min(batch.free, len(waiting), rng.randint(0, 3))
        if count:
            done += batch.join([waiting.pop(0) for _ in range(count)], "1:0")
        if batch.requests:
            done += batch.step()
    assert set(map(id, done)) == set(map(id, submitted))
    own = reference(path)
    for made in done:
        assert len(made.output) == made.sampling.max_new_tokens
        assert_own_logprobs(made, own)


def test_a_family_without_a_direct_pass_is_served_through_its_modules(tmp_path: Path):
    path = write_model(tmp_path / "gelu", seed=3, hidden_act="gelu")
    model = load(str(path), slots=2, max_length=64)
    assert model.direct is None
    batch, made = Batch(model, seed=0), request(model, [1, 7, 9])
    batch.join([made], "1:0")
    finish(batch)
    assert_own_logprobs(made, reference(path))


def test_scaled_rotary_embeddings_are_those_of_the_model(tmp_path: Path):
    path = write_model(tmp_path / "rope", seed=3, family="llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    model = load(str(path), slots=2, max_length=64)
    assert model.direct is not None
    batch, made = Batch(model, seed=0), request(model, [1, 7, 9], max_new_tokens=40)
    batch.join([made], "1:0")
    finish(batch)
    assert_own_logprobs(made, reference(path))


def test_siblings_with_one_prompt_are_prefilled_once_and_sampled_apart(served: SlotModel, model_a: Path):
    batch = Batch(served, seed=0)
    siblings = [request(served, [1, 7, 9, 17], max_new_tokens=12) for _ in range(4)]
    batch.join([*siblings, request(served, [1, 4])], "1:0")
    finish(batch)
    assert [made.shared_prompt for made in siblings] == [0, 3, 3, 3]
    assert len({tuple(made.output) for made in siblings}) > 1
    own = reference(model_a)
    for made in siblings:
        assert_own_logprobs(made, own)


def test_greedy_tokens_are_those_of_a_full_forward_at_each_position(served: SlotModel, model_a: Path):
    batch, made = Batch(served, seed=0), request(served, [1, 7, 9, 17], temperature=0.0, max_new_tokens=20)
    batch.join([request(served, [3] * 9, max_new_tokens=5), made, request(served, [5], max_new_tokens=40)], "1:0")
    finish(batch)
    rows = full_logprobs(reference(model_a), made.ids + made.output)[len(made.ids) - 1 : -1]
    assert rows.argmax(dim=-1).tolist() == made.output


def test_the_logprobs_of_the_prompt_are_at_temperature_one(served: SlotModel, model_a: Path):
    batch = Batch(served, seed=0)
    options = {"logprob_start_len": 1, "top_logprobs_num": 3}
    made = request(served, [1, 7, 9, 17], temperature=0.5, options=options)
    batch.join([request(served, [2] * 7), made], "1:0")
    rows = full_logprobs(reference(model_a), made.ids)
    assert [token for _, token in made.input_logprobs] == [7, 9, 17]
    assert made.input_logprobs[0][0] is None
    assert made.input_tops[0] is None
    for (logprob, token), tops, row in zip(made.input_logprobs[1:], made.input_tops[1:], rows[1:-1], strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [top[1] for top in tops or []] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("at", [0, 1, 5])
def test_after_an_update_tokens_are_the_new_models_over_the_old_ones_cache(at: int, model_a: Path, model_b: Path):
    """In place: what was computed under the old weights stays, and the new weights go on from there."""
    model, prompt = load(str(model_a), slots=4, max_length=64), [1, 7, 9, 17]
    batch = Batch(model, seed=0)
    made, neighbour = request(model, prompt, max_new_tokens=14), request(model, [4] * 6, max_new_tokens=3)
    batch.join([neighbour, made], "1:0")
    for _ in range(at):
        batch.step()
    weights.apply(model.model, weights.stage(str(model_b), model.model))
    batch.mark("1:1")
    finish(batch)

    split = at + 1
    assert spans(made) == [{"version": "1:0", "start": 0, "end": split}, {"version": "1:1", "start": split, "end": 14}]
    old, new = reference(model_a), reference(model_b)
    torch.testing.assert_close(torch.tensor(made.logprobs[:split]), written_logprobs(old, prompt, made.output)[:split], atol=1e-4, rtol=0)
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        if split > 1 or prompt:
            old(input_ids=torch.tensor([prompt + made.output[: split - 1]]), cache=cache, use_cache=True)
        logits = new(input_ids=torch.tensor([made.output[split - 1 : -1]]), cache=cache, use_cache=True).logits[0]
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(made.output[split:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(made.logprobs[split:]), expected, atol=1e-4, rtol=0)
    assert (torch.tensor(made.logprobs[split:]) - written_logprobs(old, prompt, made.output)[split:]).abs().max() > 0.1


def test_requests_that_join_after_an_update_are_wholly_of_the_new_model(model_a: Path, model_b: Path):
    model = load(str(model_a), slots=4, max_length=64)
    batch = Batch(model, seed=0)
    batch.join([request(model, [1, 5], max_new_tokens=4)], "1:0")
    weights.apply(model.model, weights.stage(str(model_b), model.model))
    batch.mark("1:1")
    late = request(model, [1, 7, 9], max_new_tokens=20)
    batch.join([late], "1:1")
    finish(batch)
    assert spans(late) == [{"version": "1:1", "start": 0, "end": 20}]
    assert_own_logprobs(late, reference(model_b))


@pytest.mark.parametrize("at", [0, 5])
def test_retracted_requests_go_on_under_the_new_weights_alone(at: int, model_a: Path, model_b: Path):
    """What they have keeps its logprobs; what follows is the new model's word on the whole sequence, with no key of the old one."""
    model = load(str(model_a), slots=4, max_length=64)
    batch = Batch(model, seed=0)
    made = [request(model, [1, 7, 9, 17], max_new_tokens=20, options={"logprob_start_len": 0}), request(model, [4] * 6, max_new_tokens=16)]
    batch.join(made, "1:0")
    for _ in range(at):
        batch.step()
    split, prompt_logprobs, began = at + 1, list(made[0].input_logprobs), made[0].started_at
    assert batch.retract() == made
    assert batch.requests == []
    weights.apply(model.model, weights.stage(str(model_b), model.model))
    batch.join(list(reversed(made)), "1:1")
    finish(batch)
    old, new = reference(model_a), reference(model_b)
    for one in made:
        end = one.sampling.max_new_tokens
        assert (one.retractions, len(one.output), one.shared_prompt) == (1, end, 0)
        assert spans(one) == [{"version": "1:0", "start": 0, "end": split}, {"version": "1:1", "start": split, "end": end}]
        for part, own in ((slice(0, split), old), (slice(split, end), new)):
            torch.testing.assert_close(torch.tensor(one.logprobs[part]), written_logprobs(own, one.ids, one.output)[part], atol=1e-4, rtol=0)
    assert (made[0].input_logprobs, made[0].started_at) == (prompt_logprobs, began)


def test_a_retraction_without_an_update_changes_nothing_that_a_seeded_request_writes(served: SlotModel):
    outputs = []
    for retracted in (False, True):
        batch, made = Batch(served, seed=0), request(served, [1, 7, 9], max_new_tokens=24, sampling_seed=5)
        batch.join([made], "1:0")
        for _ in range(6):
            batch.step()
        if retracted:
            batch.join(batch.retract(), "1:0")
        finish(batch)
        assert spans(made) == [{"version": "1:0", "start": 0, "end": 24}]
        outputs.append(made.output)
    assert outputs[0] == outputs[1]


def test_an_update_and_its_reversal_between_two_tokens_leave_one_span(served: SlotModel):
    batch, made = Batch(served, seed=0), request(served, [1], max_new_tokens=4)
    batch.join([made], "1:0")
    batch.mark("1:1")
    batch.mark("1:0")
    finish(batch)
    assert spans(made) == [{"version": "1:0", "start": 0, "end": 4}]


def test_two_updates_between_tokens_leave_no_empty_span(served: SlotModel):
    batch, made = Batch(served, seed=0), request(served, [1], max_new_tokens=4)
    batch.join([made], "1:0")
    batch.mark("1:1")
    batch.mark("1:2")
    finish(batch)
    assert spans(made) == [{"version": "1:0", "start": 0, "end": 1}, {"version": "1:2", "start": 1, "end": 4}]


def test_aborted_requests_leave_with_what_they_have_and_the_others_go_on(served: SlotModel, model_a: Path):
    batch = Batch(served, seed=0)
    made = [request(served, [1, 4 + i], options={"rid": rid}, max_new_tokens=20) for i, rid in enumerate(["a-1", "b-1", "a-2", "b-2"])]
    batch.join(made, "1:0")
    batch.step()
    gone = batch.abort(lambda rid: rid.startswith("a-"))
    assert {one.rid for one in gone} == {"a-1", "a-2"}
    assert all(one.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None} and len(one.output) == 2 for one in gone)
    finish(batch)
    for one in (made[1], made[3]):
        assert_own_logprobs(one, reference(model_a))


def test_logits_that_are_not_finite_end_a_request_as_a_fault_and_spoil_no_later_one(model_a: Path):
    model = load(str(model_a), slots=4, max_length=64)
    batch, kept = Batch(model, seed=0), {name: p.clone() for name, p in model.model.named_parameters()}
    batch.join([request(model, [1, 5])], "1:0")
    for parameter in model.model.parameters():
        parameter.fill_(math.nan)
    (broken,) = batch.step()
    assert broken.finish is not None
    assert broken.finish["status_code"] == 500
    for name, parameter in model.model.named_parameters():
        parameter.copy_(kept[name])
    made = [request(model, [1, 5, 9]), request(model, [2])]
    batch.join(made, "1:0")
    finish(batch)
    for one in made:
        assert_own_logprobs(one, reference(model_a))


def test_the_same_seed_writes_the_same_tokens(served: SlotModel):
    def run(seed: int) -> list[list[int]]:
        batch, made = Batch(served, seed=seed), [request(served, [1, 5 + i], max_new_tokens=10) for i in range(3)]
        batch.join(made, "1:0")
        finish(batch)
        return [one.output for one in made]

    assert run(1) == run(1)
    assert run(1) != run(2)
