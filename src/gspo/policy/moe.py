"""Routers of a mixture of experts: found by what they return, recorded and replayed through forward hooks.

A router is a module beside an ``experts`` module that returns (logits [T, E], weights [T, K], experts [T, K]), as the
families of transformers 5 do. How it makes weights of logits is found by trying: the rule that gives the router's own
weights bit for bit. Replaying forces the experts; weights are computed anew from the live logits by that rule, so
the router keeps its gradient (arXiv 2507.18071 section 5.3; arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gspo.algorithm.segments import accumulate_dtype
from gspo.config import AlgorithmConfig
from gspo.errors import ConfigError, PackingError

if TYPE_CHECKING:
    from gspo.policy.load import Policy

PROBE_TOKENS = 16
EXPERTS_TOLERANCE = 1e-4
"""Largest relative difference between two implementations of one experts layer in float32 taken for rounding."""


@dataclass(frozen=True)
class WeightRule:
    """From logits [T, E] and experts [T, K] to weights [T, K].

    softmax and sigmoid: of all E logits, then those of the chosen. chosen: softmax over the chosen logits alone.
    ``normalised``: divided by their sum. ``scale``: multiplied by it.
    """

    kind: Literal["softmax", "sigmoid", "chosen"]
    normalised: bool = False
    scale: float = 1.0

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        wide = logits.to(accumulate_dtype(logits))
        if self.kind == "chosen":
            return wide.gather(1, experts).softmax(-1) * self.scale
        shares = wide.softmax(-1) if self.kind == "softmax" else wide.sigmoid()
        chosen = shares.gather(1, experts)  # from all of them: a masked copy would have no gradient where it is 0
        if self.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.scale


@dataclass(frozen=True)
class Router:
    """The router of one layer and the experts it feeds. ``rule`` None: its weights follow no rule known here."""

    module: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int
    rule: WeightRule | None

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds an expert's number."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """The routers of ``model``, first layer first; none for a dense model, or if layers differ in size."""
    found = []
    for parent in model.modules():
        experts = getattr(parent, "experts", None)
        if isinstance(experts, nn.Module):
            candidates = [child for child in parent.children() if child is not experts]
            found += [router for router in (_as_router(child, experts) for child in candidates) if router]
    same_size = len({(router.num_experts, router.top_k) for router in found}) == 1
    return tuple(found) if same_size else ()


@torch.no_grad()
def _as_router(module: nn.Module, experts: nn.Module) -> Router | None:
    x = _random_input(module)
    if x is None:
        return None
    try:
        output = module(x)
    except Exception:  # a module of another kind may fail in any way
        return None
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return None
    logits, weights, chosen = output
    fits = logits.ndim == 2 and weights.shape == chosen.shape and chosen.ndim == 2 and len(chosen) == len(logits)
    if not fits or chosen.is_floating_point() or logits.shape[0] != PROBE_TOKENS:
        return None
    return Router(module, experts, logits.shape[1], chosen.shape[1], _rule(module, logits, weights, chosen))


def _rule(module: Any, logits: Tensor, weights: Tensor, chosen: Tensor) -> WeightRule | None:
    scale = float(getattr(module, "routed_scaling_factor", None) or 1.0)
    rules = [
        WeightRule("softmax", True, scale),
        WeightRule("softmax", False, scale),
        WeightRule("chosen", False, scale),
        WeightRule("sigmoid", True, scale),
        WeightRule("sigmoid", False, scale),
    ]
    return next((rule for rule in rules if torch.equal(rule.weights(logits, chosen).to(weights.dtype), weights)), None)


class RoutingRecord:
    """What the routers chose since the last ``take``, call by call."""

    def __init__(self, routers: tuple[Router, ...]) -> None:
        self._experts: list[list[Tensor]] = [[] for _ in routers]
        self._logits: list[list[Tensor]] = [[] for _ in routers]

    def add(self, layer: int, experts: Tensor, logits: Tensor | None) -> None:
        self._experts[layer].append(experts)
        if logits is not None:
            self._logits[layer].append(logits)

    def take(self) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """(experts [T, layers, K], logits by layer [T, E] if kept) of all T tokens since; None without routers."""
        experts, logits = self._experts, self._logits
        self._experts, self._logits = [[] for _ in experts], [[] for _ in logits]
        if not experts or not experts[0]:
            return None, ()
        return (
            torch.stack([torch.cat(calls) for calls in experts], dim=1),
            tuple(torch.cat(calls) for calls in logits if calls),
        )


@contextmanager
def record_routing(policy: Policy, *, logits: bool = False) -> Iterator[RoutingRecord]:
    """Record the routers' own choice in the model calls inside the block, also where ``replay_routing`` overrules it.

    Without routers there are no hooks. ``logits``: keep them too, with gradient.
    """
    record = RoutingRecord(policy.routers)
    with ExitStack() as hooks:
        for layer, router in enumerate(policy.routers):

            def watch(module: Any, args: Any, output: Any, layer: int = layer, router: Router = router) -> None:
                record.add(layer, output[2].to(router.dtype), output[0] if logits else None)

            handle = router.module.register_forward_hook(watch, prepend=True)  # before any replay
            hooks.callback(handle.remove)
        yield record


@contextmanager
def replay_routing(policy: Policy, experts: Tensor | None) -> Iterator[None]:
    """Force ``experts`` [T, layers, K] on the one model call inside the block; None forces nothing.

    Raises PackingError when they are not T tokens of this model: replay one token off is quietly another model.
    """
    with ExitStack() as hooks:
        if experts is not None:
            _check_experts(policy, experts)
            for layer, router in enumerate(policy.routers):
                chosen = experts[:, layer].to(policy.device).long()
                hooks.callback(router.module.register_forward_hook(_force(router, chosen)).remove)
        yield


def _force(router: Router, chosen: Tensor) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        logits, weights, _ = output
        if logits.shape[0] != chosen.shape[0]:
            raise PackingError(
                f"Routing replay has experts for {chosen.shape[0]} tokens and the pass has {logits.shape[0]}; they "
                "must be equal. Cut and merge experts together with the tokens."
            )
        assert router.rule is not None  # checked before any pass
        forced = router.rule.weights(logits, chosen)
        return logits, forced if forced.dtype == torch.float64 else forced.to(weights.dtype), chosen

    return hook


def _check_experts(policy: Policy, experts: Tensor) -> None:
    check_routers(policy, "Routing replay")
    expected = (len(policy.routers), policy.routers[0].top_k)
    if experts.ndim != 3 or experts.shape[1:] != expected:
        raise PackingError(
            f"Routing replay expects experts of shape [tokens, {expected[0]} layers, {expected[1]} experts] for this "
            f"model, found {list(experts.shape)}."
        )
    highest = policy.routers[0].num_experts - 1
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) <= highest:
        raise PackingError(
            f"Routing replay has expert {int(experts.max())}; this model's experts are numbered 0 to {highest}."
        )


def check_routers(policy: Policy, setting: str) -> None:
    """Raise ConfigError, naming ``setting``, when the model has no routers or weighs experts by an unknown rule."""
    if not policy.routers:
        raise ConfigError(
            f"{setting} needs a mixture-of-experts model whose routers gspo can see; {policy.name!r} has none. "
            "Remove the setting or choose another model.path."
        )
    strange = [router for router in policy.routers if router.rule is None]
    if strange:
        raise ConfigError(
            f"{setting} is not available for {policy.name!r}: its {type(strange[0].module).__name__} weighs experts by "
            "a rule gspo does not know, so forced experts could not be weighed right. Remove the setting."
        )


def check_settings(policy: Policy, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError when the algorithm asks for something of routers that this model cannot give."""
    if algorithm.routing_replay != "none":
        check_routers(policy, f"algorithm.routing_replay = {algorithm.routing_replay!r}")
    if algorithm.router_aux_weight > 0:
        check_routers(policy, f"algorithm.router_aux_weight = {algorithm.router_aux_weight:g}")


@torch.no_grad()
def choose_experts(policy: Policy) -> str | None:
    """Decide how experts are computed and return one line for the user; None for a dense model.

    grouped_mm where it agrees with the family's own loop, else that loop. Fixed, not timed, so that a run can be
    repeated bit for bit: the loop's backward writes a gradient of all experts once for each expert, batched_mm copies
    an expert's weights for every token, and both were slower on every size measured (docs/moe.md).
    """
    if not policy.routers:
        return None
    router, model = policy.routers[0], policy.model
    size = f"experts: {router.top_k} of {router.num_experts} a token in {len(policy.routers)} layers, computed by "
    if not model._can_set_experts_implementation():
        return f"{size}the family's own loop"
    model.set_experts_implementation("eager")
    expected = _experts_output(router)
    try:
        model.set_experts_implementation("grouped_mm")
        gap = float((_experts_output(router) - expected).norm() / expected.norm().clamp(min=1e-30))
    except (ImportError, NotImplementedError, RuntimeError, ValueError):  # no such kernel on this machine
        gap = float("inf")
    if gap <= EXPERTS_TOLERANCE:
        return f"{size}grouped_mm, checked against the family's own loop"
    model.set_experts_implementation("eager")
    return f"{size}the family's own loop"


def _experts_output(router: Router) -> Tensor:
    """Of one layer on random input [PROBE_TOKENS, D]."""
    x = _random_input(router.module)
    assert x is not None
    _, weights, chosen = router.module(x)
    return router.experts(x, chosen, weights)


def _random_input(module: nn.Module) -> Tensor | None:
    """[PROBE_TOKENS, D] for a module that takes hidden states; None if it has no matrix to tell D."""
    matrix = next((parameter for parameter in module.parameters() if parameter.ndim == 2), None)
    if matrix is None:
        return None
    return torch.randn(PROBE_TOKENS, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
