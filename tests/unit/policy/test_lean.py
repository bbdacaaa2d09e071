"""Lean modules give the model's own numbers, and keep less."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaForCausalLM

from gspo.policy.lean import lean

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_same_output_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    stock = llama(dtype)
    ours = copy.deepcopy(stock)
    assert lean(ours) == 2 * 3 + 1
    ids = torch.arange(20)[None]
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (stock, ours)]
    assert torch.equal(*outputs)
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for output in outputs:
        (output * weights).sum().backward()
    for (name, first), second in zip(stock.named_parameters(), ours.parameters(), strict=True):
        gap = float((first.grad - second.grad).norm() / first.grad.norm())
        assert gap < tolerance, name


def test_less_is_kept() -> None:
    """Counted: bytes saved for the backward pass, parameters left out."""

    def kept(model: nn.Module) -> int:
        own = {parameter.data_ptr() for parameter in model.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.model(input_ids=torch.arange(40)[None], use_cache=False).last_hidden_state
        size = sum(seen.values())
        assert output.requires_grad
        return size

    stock = llama(torch.bfloat16)
    ours = copy.deepcopy(stock)
    lean(ours)
    assert kept(ours) < 0.8 * kept(stock)


def test_what_differs_stays() -> None:
    """Gemma's norm scales by 1 + weight and its activation is another: neither may be replaced."""
    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**SMALL))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.5)
    assert lean(model) == 0
