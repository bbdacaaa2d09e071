"""An engine of the experiments: 8-bit weights, as inference engines offer them."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.engines.native import NativeEngine
from gspo.rollout.system import System, copy_policy


class Int8Engine(NativeEngine):
    """Samples from a copy of the policy whose matrices are rounded to 8 bits, one scale an output row; products in the
    trainer's precision (weight-only quantization). The head is rounded too, embeddings that are not the head are not.
    """

    def load_weights(self, version: int) -> None:
        super().load_weights(version)
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                head = weight is self.policy.model.get_output_embeddings().weight
                if weight.ndim > 1 and (head or "embed" not in name):
                    weight.copy_(to_int8_and_back(weight))


def to_int8_and_back(weight: Tensor) -> Tensor:
    """The nearest of 255 levels in each row of the last dimension."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round() * scale


def sample_in_int8(system: System) -> None:
    """Give the system this engine."""
    owner = system.policy
    engine = Int8Engine(copy_policy(owner, owner.dtype), owner=owner, max_batch=128)
    engine.load_weights(0)
    system.engine = engine
