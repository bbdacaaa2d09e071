"""Laid-out weights multiply to the same bits, and leave no trace behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gspo.policy.prepacked import prepacked


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_same_bits_and_no_trace(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 32)).bfloat16()
    x = torch.randn(rows, 3, 64).bfloat16()
    with torch.inference_mode():
        plain = model(x)
        with prepacked(model, rows):
            assert ("forward" in vars(model[0])) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
            inside = model(x)
    assert torch.equal(plain, inside)
    assert "forward" not in vars(model[0]) and "forward" not in vars(model[1])
    with torch.no_grad():
        model[0].weight.mul_(2)  # new weights are seen by the next block
    with torch.inference_mode(), prepacked(model, rows):
        again = model(x)
    assert torch.equal(again, model(x)) and not torch.equal(again, plain)


def test_float32_is_left_alone() -> None:
    model = nn.Linear(8, 8)
    with prepacked(model, 4):
        assert "forward" not in vars(model)


def test_an_operator_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(16, 16).bfloat16()
    monkeypatch.setattr("gspo.policy.prepacked._product", lambda layer, rows: lambda x: x * 0)
    with prepacked(model, 4):
        assert "forward" not in vars(model)


def test_an_error_inside_restores_the_layers() -> None:
    model = nn.Linear(16, 16).bfloat16()
    with pytest.raises(RuntimeError), prepacked(model, 4):
        raise RuntimeError
    assert "forward" not in vars(model)
