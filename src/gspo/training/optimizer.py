"""AdamW on float32 master weights, whatever the model computes in.

bfloat16 weights cannot hear an update of 1e-6: their spacing at 0.02 is 1e-4. So the optimizer owns float32
weights, gradients are added up in float32 over the passes of an update, and the model gets a rounded copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gspo.config import OptimizerConfig


class MasterOptimizer:
    """``master`` are the float32 weights: the model's own when it is float32, else copies; both in order of ``names``.

    ``intact`` is False while weights are being changed: what is saved then would be neither the old nor the new ones.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_updates: int) -> None:
        self.config, self.total_updates = config, total_updates
        self.updates = 0
        self.intact = True
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = list(trained)
        self.model_parameters: list[Tensor] = list(trained.values())
        self.copies = any(parameter.dtype == torch.bfloat16 for parameter in self.model_parameters)
        self.hooks: list[Any] = []
        if self.copies:
            self.master = [parameter.detach().float() for parameter in self.model_parameters]
            for parameter, master in zip(self.model_parameters, self.master, strict=True):
                self.hooks.append(parameter.register_post_accumulate_grad_hook(_move_gradient_to(master)))
        else:
            self.master = list(self.model_parameters)
        self.clear()  # what a pass that was broken off, or the model's owner, left there is not of this run
        self.adam = torch.optim.AdamW(
            self.master,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def learning_rate(self) -> float:
        """Of the next update."""
        return learning_rate(self.config, self.updates, self.total_updates)

    def gradient_norm(self) -> float:
        """L2 norm of the whole gradient; 0 when there is none."""
        gradients = [master.grad for master in self.master if master.grad is not None]
        if not gradients:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))

    def step(self) -> tuple[float, bool]:
        """One update from the gradients added up since the last: (gradient norm before clipping, was it made).

        A gradient that is not finite is thrown away and the weights stay as they are.
        """
        norm = self.gradient_norm()
        made = math.isfinite(norm)
        if made:
            gradients = [master.grad for master in self.master if master.grad is not None]
            if norm > self.config.max_grad_norm:
                torch._foreach_mul_(gradients, self.config.max_grad_norm / norm)
            for group in self.adam.param_groups:
                group["lr"] = self.learning_rate()
            self.intact = False
            self.adam.step()
            self.copy_to_model()
            self.intact = True
        self.updates += 1
        self.clear()
        return norm, made

    def skip(self) -> None:
        """An update without signal: the weights stay (Adam's momentum would move them), the schedule goes on."""
        self.updates += 1
        self.clear()

    def clear(self) -> None:
        """Drop the gradients: the next pass writes them anew instead of adding to zeros."""
        for tensor in (*self.master, *self.model_parameters):
            tensor.grad = None

    def release(self) -> None:
        """Leave the model to whoever trains it next: until then its gradients come here and nowhere else."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.clear()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.model_parameters, self.master)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take float32 weights by parameter name."""
        for name, master in zip(self.names, self.master, strict=True):
            master.copy_(weights[name])
        self.copy_to_model()

    def moments(self) -> dict[str, Tensor]:
        """Adam's state as 'KIND/PARAMETER'; a parameter that never had a gradient has none."""
        return {
            f"{kind}/{name}": value.contiguous()
            for name, master in zip(self.names, self.master, strict=True)
            for kind, value in self.adam.state.get(master, {}).items()
        }

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """The reverse of ``moments``; parameters go by name, whatever their order."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            states.setdefault(self.names.index(name), {})[kind] = value
        self.adam.load_state_dict({"state": states, "param_groups": self.adam.state_dict()["param_groups"]})


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """Of update number ``update`` (from 0): linear warm-up, then the schedule's fall to 0 at ``total``."""
    if update < config.warmup:
        return config.learning_rate * (update + 1) / config.warmup
    progress = min((update - config.warmup) / max(total - config.warmup, 1), 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return config.learning_rate * factor[config.schedule]


def _move_gradient_to(master: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    return hook
