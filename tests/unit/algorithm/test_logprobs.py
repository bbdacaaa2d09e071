"""The tiled head against a whole log-softmax: values, gradients, and that no [N, V] tensor exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo.algorithm.logprobs import TokenLogprobs, plain_logprobs, token_logprobs

N, D, V = 17, 8, 53


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets; the first and the last vocabulary entry are among the targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((N, D), (V, D), (V,))
    )
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> TokenLogprobs:
    """By torch's own distribution, from whole logits."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return TokenLogprobs(distribution.log_prob(targets), distribution.entropy().detach())


def gradients(logprobs: Tensor, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """With a different weight for each token."""
    return torch.autograd.grad((logprobs * torch.linspace(-1, 2, logprobs.shape[0])).sum(), list(inputs))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
@pytest.mark.parametrize("chunk", [1, 7, 52, 53, 54, 1000])
def test_equals_the_plain_softmax(chunk: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, bias, targets = inputs()
    used, wanted = (bias, [hidden, weight, bias]) if with_bias else (None, [hidden, weight])
    found = token_logprobs(hidden, weight, targets, temperature=temperature, bias=used, vocab_chunk=chunk)
    expected = plain(hidden, weight, used, targets, temperature)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(found.logprobs, wanted), gradients(expected.logprobs, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_float32() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    found, expected = token_logprobs(hidden, weight, targets, vocab_chunk=10), plain(hidden, weight, None, targets, 1.0)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=5e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=5e-6)
    for ours, theirs in zip(
        gradients(found.logprobs, [hidden, weight]), gradients(expected.logprobs, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_gradcheck() -> None:
    hidden, weight, bias, targets = inputs()

    def scored(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, targets, temperature=0.8, bias=bias, vocab_chunk=20).logprobs

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


def test_bfloat16_products_are_normalised_in_float32() -> None:
    """Probabilities of all V targets add up to 1, far closer than bfloat16 rounds; gradients keep the inputs' dtype."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((1, D), (V, D)))
    found = token_logprobs(hidden.expand(V, D), weight, torch.arange(V), vocab_chunk=7)
    assert found.logprobs.dtype == torch.float32
    assert found.logprobs.detach().double().exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    exact = plain(hidden.double().expand(V, D), weight.double(), None, torch.arange(V), 1.0)
    torch.testing.assert_close(found.logprobs.double(), exact.logprobs, rtol=0, atol=0.05)
    for ours, theirs in zip(
        gradients(found.logprobs, [hidden, weight]), gradients(exact.logprobs, [hidden, weight]), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.full((2, 1), 1e4), torch.tensor([[-3.0], [0.0], [3.0], [2.0]])
    found = token_logprobs(hidden, weight, torch.tensor([2, 0]), vocab_chunk=1)
    assert found.logprobs.tolist() == [0.0, -6e4]
    assert found.entropy is not None and found.entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("start", [0, 20, 43])
def test_a_forbidden_token_has_probability_zero(start: int) -> None:
    """A bias of -inf, as vocabulary padding has it, in one place and all over a tile: the first, a later, the last."""
    hidden, weight, _, targets = inputs()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[19], bias[start : start + 10] = -torch.inf, -torch.inf
    targets = torch.where(bias[targets].isinf(), 12, targets)
    found = token_logprobs(hidden, weight, targets, bias=bias, vocab_chunk=10)
    keep = bias == 0
    places = keep.cumsum(0)[targets] - 1
    expected = plain(hidden, weight[keep], None, places, 1.0)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-12)
    for gradient in gradients(found.logprobs, [hidden, weight]):
        assert gradient.isfinite().all()


def test_no_tokens() -> None:
    _, weight, _, _ = inputs()
    hidden = torch.zeros(0, D, dtype=torch.float64, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert found.logprobs.shape == (0,) and found.entropy is not None and found.entropy.shape == (0,)
    ours = torch.autograd.grad(found.logprobs.sum(), [hidden, weight])
    assert ours[0].shape == (0, D) and torch.equal(ours[1], torch.zeros_like(weight))


def test_entropy_is_detached_and_may_be_left_out() -> None:
    hidden, weight, _, targets = inputs()
    found = token_logprobs(hidden, weight, targets)
    assert found.entropy is not None and not found.entropy.requires_grad
    without = token_logprobs(hidden, weight, targets, entropy=False)
    assert without.entropy is None
    assert torch.equal(without.logprobs, found.logprobs)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _, targets = inputs()
    expected = gradients(token_logprobs(hidden, weight, targets).logprobs, [hidden, weight])
    tensors = {"hidden": hidden.detach().clone().requires_grad_(), "weight": weight.detach().clone().requires_grad_()}
    tensors[frozen].requires_grad_(False)
    with Recorder() as seen:
        logprobs = token_logprobs(tensors["hidden"], tensors["weight"], targets).logprobs
        (logprobs * torch.linspace(-1, 2, N)).sum().backward()
    assert tensors[frozen].grad is None
    other = "weight" if frozen == "hidden" else "hidden"
    found = tensors[other].grad
    assert found is not None
    torch.testing.assert_close(found, expected[0 if other == "hidden" else 1])
    assert tuple(tensors[frozen].shape) not in seen.products  # not even computed


def test_plain_logprobs_is_float32_of_low_precision_logits() -> None:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(N)
    found = plain_logprobs(logits.bfloat16(), targets, 0.7)
    expected = torch.distributions.Categorical(logits=logits.bfloat16().double() / 0.7)
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close(found.logprobs.double(), expected.log_prob(targets), rtol=0, atol=1e-6)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy.double(), expected.entropy(), rtol=0, atol=1e-6)


class Recorder(TorchDispatchMode):
    """The largest tensor any operation made, and the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        if "mm" in func.__name__:
            self.products += [tuple(tensor.shape) for tensor in tensors]
        return result


def test_no_tensor_of_tokens_by_vocabulary() -> None:
    """Nothing is larger than one tile or the head; each tile's weight gradient is one product."""
    tokens, vocabulary, width, chunk = 300, 5000, 16, 256
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((tokens, width), (vocabulary, width))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    with Recorder() as seen:
        token_logprobs(hidden, weight, targets, vocab_chunk=chunk).logprobs.sum().backward()
    assert seen.largest <= max(tokens * chunk, vocabulary * width)
    assert seen.products.count((chunk, width)) == vocabulary // chunk
    assert seen.products.count((vocabulary % chunk, width)) == 1
    with Recorder() as seen:  # the recorder sees what is to be avoided
        plain_logprobs(hidden @ weight.T, targets).logprobs.sum().backward()
    assert seen.largest == tokens * vocabulary


def test_wrong_arguments_say_what_was_expected() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=r"vocab_chunk must be at least 1, found 0"):
        token_logprobs(hidden, weight, targets, vocab_chunk=0)
    with pytest.raises(ValueError, match=r"\[17, 8\], \[53, 8\] and \[16\]"):
        token_logprobs(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match=r"\[17, 8\], \[53, 7\] and \[17\]"):
        token_logprobs(hidden, weight[:, 1:], targets)
    for wrong in (-100, V):
        with pytest.raises(ValueError, match=rf"targets must lie in \[0, 53\), found .*{wrong}"):
            token_logprobs(hidden, weight, torch.full_like(targets, wrong))


def test_a_second_derivative_is_refused() -> None:
    """The backward pass has none: a wrong number would be worse than an error."""
    hidden, weight, _, targets = inputs()
    logprobs = token_logprobs(hidden, weight, targets).logprobs
    (first,) = torch.autograd.grad((logprobs**2).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
