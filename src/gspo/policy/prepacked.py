"""Linear layers whose weights are laid out ahead for the CPU's matrix units, for as long as no weight changes.

A product of few rows spends a third of its time bringing the weight into the layout that the kernels want. While
answers are decoded the weights stand still, so that is done once. The second copy lives only inside the block: it is
gone before an update needs the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def prepacked(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside the block, bfloat16 linear layers of ``model`` on the CPU multiply with laid-out weights.

    ``rows``: how many rows most inputs have. No gradients inside. Only where the operators exist (they are those of
    torch's own compiler) and give, for every shape of weight there is, the same bits as the plain product.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _packable(module.weight)]
    by_shape = {(*layer.weight.shape, layer.bias is None): layer for layer in layers}
    if not layers or not all(_same(layer, rows) for layer in by_shape.values()):
        yield
        return
    for layer in layers:
        layer.forward = _product(layer, rows)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _product(layer: nn.Linear, rows: int) -> Any:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")


@torch.no_grad()
def _same(layer: nn.Linear, rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, layer.in_features, generator=generator).to(layer.weight.dtype)
    try:
        return torch.equal(_product(layer, rows)(x), F.linear(x, layer.weight, layer.bias))
    except (AttributeError, RuntimeError):  # a torch built without these operators
        return False
