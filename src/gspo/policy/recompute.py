"""Layers that keep only their input for the backward pass and compute the rest once more there.

The memory of a pass then grows with one layer's activations instead of all layers', for a third more time. The layers
are those that transformers itself marks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import ConfigError

if TYPE_CHECKING:
    from gspo.policy.load import Policy


@contextmanager
def recompute_layers(policy: Policy, again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Recompute the layers of the model call inside the block, if the policy is set to and there is a gradient.

    ``again`` makes what the block stands in (attention, replayed experts) once more around each layer's second
    computation, which happens in the backward pass, after the block.
    """
    layers = find_layers(policy) if policy.recompute and torch.is_grad_enabled() else []
    # no random state: dropout is off in every pass
    function = partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), again())
    )
    try:
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, function
            layer.training = True  # read by the layer's wrapper alone; its modules stay in eval mode
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = False, None
            layer.training = False


def find_layers(policy: Policy) -> list[Any]:
    return [module for module in policy.backbone.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_recompute(policy: Policy) -> None:
    """Raise ConfigError when no layer of the model can be computed twice."""
    if policy.recompute and not find_layers(policy):
        raise ConfigError(
            "batch.recompute_activations needs a model whose layers transformers can compute again; those of the "
            f"family {policy.model.config.model_type!r} cannot. Set it to false and lower batch.max_tokens instead."
        )
