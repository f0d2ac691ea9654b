from __future__ import annotations

import torch

from producer.engine.embedded.request import SamplingParams
from producer.engine.embedded.sampling import Rows, sample

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])


def draw(params: SamplingParams, *, rows: int = 4000, seed: int = 0) -> torch.Tensor:
    prepared = Rows([params] * rows, [None] * rows)
    return sample(LOGITS.repeat(rows, 1), prepared, torch.Generator().manual_seed(seed)).tokens


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=5) / len(tokens)


def test_tokens_follow_the_softmax_at_the_rows_temperature():
    for temperature in (1.0, 0.5, 2.0):
        expected = torch.softmax(LOGITS / temperature, dim=-1)
        assert (shares(draw(SamplingParams(temperature=temperature))) - expected).abs().max() < 0.03


def test_temperature_zero_and_top_k_one_take_the_likeliest():
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert draw(params).eq(0).all()


def test_top_k_keeps_the_k_likeliest_and_their_proportions():
    expected = torch.softmax(LOGITS[:2], dim=-1)
    found = shares(draw(SamplingParams(top_k=2)))
    assert (found[:2] - expected).abs().max() < 0.03
    assert found[2:].sum() == 0


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    assert torch.softmax(LOGITS, dim=-1)[:2].sum() > 0.8 > torch.softmax(LOGITS, dim=-1)[0]
    found = shares(draw(SamplingParams(top_p=0.8)))
    assert found[1] > 0
    assert found[2:].sum() == 0
    assert draw(SamplingParams(top_p=1e-6)).eq(0).all()


def test_logprobs_are_after_temperature_and_before_the_cut():
    params = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=2, temperature=2.0), SamplingParams(temperature=0.0)]
    result = sample(LOGITS.repeat(4, 1), Rows(params, [None] * 4), torch.Generator().manual_seed(3))
    expected = torch.stack([torch.log_softmax(LOGITS / t, dim=-1) for t in (1.0, 0.5, 2.0, 1.0)])
    torch.testing.assert_close(result.logprobs, expected)
    torch.testing.assert_close(result.chosen, expected.gather(1, result.tokens[:, None])[:, 0])


def test_a_seeded_row_does_not_depend_on_its_neighbours():
    seeded = SamplingParams(sampling_seed=5)
    alone = sample(LOGITS[None], Rows([seeded], [torch.Generator().manual_seed(5)]), torch.Generator().manual_seed(1)).tokens[0]
    for neighbours in (1, 7):
        params = [SamplingParams()] * neighbours + [seeded]
        generators = [None] * neighbours + [torch.Generator().manual_seed(5)]
        tokens = sample(LOGITS.repeat(neighbours + 1, 1), Rows(params, generators), torch.Generator().manual_seed(2)).tokens
        assert tokens[-1] == alone


def test_the_same_seed_draws_the_same_tokens():
    assert draw(SamplingParams(), seed=4).equal(draw(SamplingParams(), seed=4))
    assert not draw(SamplingParams(), seed=4).equal(draw(SamplingParams(), seed=5))
