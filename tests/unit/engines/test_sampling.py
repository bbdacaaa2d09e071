"""One-pass sampling: the right distribution, the right log-probability, and nothing impossible."""

from __future__ import annotations

import pytest
import torch

from gspo.engines.sampling import sample_tokens


@pytest.mark.parametrize("vocabulary", [5, 128, 300, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_those_of_the_tempered_distribution(vocabulary: int, temperature: float) -> None:
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample_tokens(logits, uniforms, temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-6)


def test_the_inverse_of_the_distribution_function() -> None:
    """For evenly spread uniforms, counts equal probability x draws to within one draw: the inverse CDF, exactly."""
    vocabulary, draws = 300, 20_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    uniforms = (torch.arange(draws) + 0.5) / draws
    tokens, _ = sample_tokens(logits.expand(draws, -1), uniforms, 1.0)
    counts = torch.bincount(tokens, minlength=vocabulary)
    expected = logits.double().softmax(-1) * draws
    assert (counts - expected).abs().max() < 2.0
    assert (tokens.diff() >= 0).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0])
def test_impossible_tokens_are_never_drawn(uniform: float) -> None:
    """Also at the very ends, where rounding could run past the last token with any weight."""
    logits = torch.full((1, 400), -torch.inf)
    logits[0, 130:140] = 0.0
    token, logprob = sample_tokens(logits, torch.tensor([uniform]), 1.0)
    assert 130 <= int(token) < 140
    assert float(logprob) == pytest.approx(-2.302585, abs=1e-5)


def test_temperature_zero_is_greedy_with_untempered_logprobs() -> None:
    token, logprob = sample_tokens(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0.99]), 0.0)
    assert int(token) == 0
    assert float(logprob) == pytest.approx(-0.169846, abs=1e-5)


def test_temperature_changes_the_logprob_as_it_should() -> None:
    """trl#3029: logits [2, 0, -1], token 1: -2.169846 at T = 1 and -3.374871 at T = 0.6."""
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    for temperature, expected in ((1.0, -2.169846), (0.6, -3.374871)):
        found = {}
        for uniform in torch.linspace(0, 1, 200):
            token, logprob = sample_tokens(logits, uniform[None], temperature)
            found[int(token)] = float(logprob)
        assert found[1] == pytest.approx(expected, abs=1e-5)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(1, 49_152, dtype=torch.bfloat16)
    _, logprob = sample_tokens(logits, torch.tensor([0.3]), 1.0)
    assert logprob.dtype == torch.float32
    assert float(logprob) == pytest.approx(-10.802673, abs=1e-4)
