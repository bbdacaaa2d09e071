"""The one place that calls the model to score tokens, and the check at start that the packed call is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithm.batch import Layout, PackedBatch, split_by_sequence
from gspo.algorithm.logprobs import TokenLogprobs, plain_logprobs, token_logprobs
from gspo.errors import ConfigError
from gspo.packing import Row, pack
from gspo.policy import attention, moe
from gspo.policy.load import Policy
from gspo.policy.recompute import recompute_layers

TOLERANCE = 1e-4
"""Largest log-probability difference (nats) between packed and plain in float32 that is taken for rounding."""
GRADIENT_TOLERANCE = 1e-3
"""The same for the parameter gradient, relative to its norm."""


@dataclass(frozen=True)
class Scored(TokenLogprobs):
    """And of a mixture of experts: ``experts`` uint8 or int16 [T, layers, K], the routers' own choice at every forward
    token; ``router_logits`` [N, E] by layer, where tokens are predicted, with gradient, if asked for."""

    experts: Tensor | None = None
    router_logits: tuple[Tensor, ...] = ()


def score(
    policy: Policy,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 2048,
    entropy: bool = True,
    replay: Tensor | None = None,
    router_logits: bool = False,
) -> Scored:
    """Log-probability (nats, float32) and entropy of every completion token of a pass, at ``temperature``.

    Shapes: both [N]. With gradient when grad mode is on. Packed where the policy says 'grouped'; else one row at a time
    with the model's own attention. ``replay`` [T, layers, K] forces these experts; raises PackingError when they do not
    fit the pass or the model.
    """
    policy.model.eval()  # dropout off in every pass: old and new log-probs must come from one function
    if policy.attention == "plain":
        return score_plain(policy, batch, temperature=temperature, replay=replay, router_logits=router_logits)
    context = attention.PackedAttention(batch.layout)
    with moe.record_routing(policy, logits=router_logits) as record:
        hidden = packed_hidden(policy, batch.token_ids, batch.position_ids, context, replay)
    experts, logits = record.take()
    head = policy.head
    index = batch.predict_index.to(hidden.device)
    found = token_logprobs(
        hidden[index],
        head.weight,
        batch.targets.to(hidden.device),
        temperature=temperature,
        bias=getattr(head, "bias", None),
        vocab_chunk=vocab_chunk,
        entropy=entropy,
    )
    return Scored(found.logprobs, found.entropy, experts, tuple(layer[index] for layer in logits))


@contextmanager
def _model_call(policy: Policy, implementation: str, replay: Tensor | None) -> Iterator[None]:
    """What one call of the model stands in: attention, forced experts, and how much is kept for the backward pass."""

    @contextmanager
    def setting() -> Iterator[None]:
        with policy.attention_implementation(implementation), moe.replay_routing(policy, replay):
            yield

    with setting(), recompute_layers(policy, setting):
        yield


def packed_hidden(
    policy: Policy,
    token_ids: Tensor,
    position_ids: Tensor,
    context: attention.AttentionContext,
    replay: Tensor | None = None,
) -> Tensor:
    """Last hidden states [T, D] of one packed row.

    No mask and no cache object: with either, transformers silently lets packed rows see each other.
    """
    with _model_call(policy, attention.NAME, replay):
        output = policy.backbone(
            input_ids=token_ids[None].to(policy.device),
            position_ids=position_ids[None].to(policy.device),
            attention_mask=None,
            use_cache=False,
            gspo_context=context,
        )
    return output.last_hidden_state[0]


def score_next(policy: Policy, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """Log-probability (nats, float32) of each of ``token_ids`` to come next after ``prompt_ids``."""
    policy.model.eval()
    row = Row(prompt_ids, token_ids[:1], [True], 1.0, [0.0])
    batch = pack([row], [0], max_tokens=len(prompt_ids) + 1)[0]
    with torch.no_grad():
        if policy.attention == "plain":
            attend = policy.attention_implementation("sdpa" if policy.model._supports_sdpa else "eager")
            with attend:
                ids = torch.tensor([list(prompt_ids)], device=policy.device)
                logits = policy.model(input_ids=ids, use_cache=False).logits[0, -1]
        else:
            context = attention.PackedAttention(batch.layout)
            logits = policy.head(packed_hidden(policy, batch.token_ids, batch.position_ids, context)[-1])
    return logits.float().log_softmax(-1)[list(token_ids)].tolist()


def score_plain(
    policy: Policy,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    replay: Tensor | None = None,
    router_logits: bool = False,
) -> Scored:
    """The oracle and fall-back: each row on its own, prompt repeated, the model's own attention and logits."""
    scored = []
    rows = _forward_tokens(batch.layout)
    completions = split_by_sequence(batch.targets, batch.cu_seqlens)
    with moe.record_routing(policy, logits=router_logits) as record:
        for tokens, completion in zip(rows, completions, strict=True):
            inputs = batch.token_ids[tokens][None].to(policy.device)
            own = "sdpa" if policy.model._supports_sdpa else "eager"
            with _model_call(policy, own, None if replay is None else replay[tokens]):
                logits = policy.model(input_ids=inputs, use_cache=False).logits[0, -len(completion) :]
            scored.append(plain_logprobs(logits, completion.to(policy.device), temperature))
    entropies = [values.entropy for values in scored if values.entropy is not None]
    experts, routed = record.take()
    if experts is not None:  # a shared prompt is written once for each of its rows
        by_row, experts = experts, experts.new_empty(batch.num_tokens, *experts.shape[1:])
        experts[torch.cat(rows)] = by_row
    ends = torch.tensor([len(tokens) for tokens in rows]).cumsum(0).tolist()
    predict = torch.cat([torch.arange(end - len(c), end) for end, c in zip(ends, completions, strict=True)])
    return Scored(
        torch.cat([values.logprobs for values in scored]),
        torch.cat(entropies),
        experts,
        tuple(layer[predict] for layer in routed),
    )


def _forward_tokens(layout: Layout) -> list[Tensor]:
    """For each sequence, where its prompt and its completion without the last token lie in the packed pass."""
    return [
        torch.cat([torch.arange(*group.prompt), torch.arange(*span)])
        for group in layout.groups
        for span in group.completions
    ]


@dataclass(frozen=True)
class ForwardCheck:
    """Packed against plain on a few short rows. ``logprob_gap`` in nats; ``gradient_gap`` relative to the norm."""

    agrees: bool
    logprob_gap: float
    gradient_gap: float
    reason: str


@torch.enable_grad()
def verify_forward(policy: Policy) -> ForwardCheck:
    """Compare log-probabilities and parameter gradients of the packed and the plain pass; changes nothing.

    Made on float32 weights, before they are rounded to the compute precision: in bfloat16 rounding alone moves a
    log-probability by 0.1, which would hide a leak between rows. Families differ in what they do with positions, masks
    and keyword arguments, and the failures are silent.
    """
    if not any(parameter.requires_grad for parameter in policy.model.parameters()):
        raise ConfigError(
            f"All weights of {policy.name!r} are frozen (requires_grad is False), so none can be trained."
        )
    batch = _check_batch(policy.model.config.get_text_config().vocab_size)
    plain, plain_gradient, experts = _probe(policy, batch, "plain")
    if not all(router.rule for router in policy.routers):
        experts = None  # cannot be replayed
    try:
        # with the same experts: on a near tie rounding picks another one, which is no fault of packing
        packed, packed_gradient, _ = _probe(policy, batch, "grouped", experts)
    except (attention.UnsupportedAttention, TypeError, AttributeError) as error:
        return ForwardCheck(False, float("nan"), float("nan"), str(error))
    gap = (packed - plain).abs().max().item()
    distance = sum(((a - b).double() ** 2).sum().item() for a, b in zip(packed_gradient, plain_gradient, strict=True))
    size = sum((b.double() ** 2).sum().item() for b in plain_gradient)
    gradient_gap = (distance / max(size, 1e-300)) ** 0.5
    agrees = gap <= TOLERANCE and gradient_gap <= GRADIENT_TOLERANCE
    reason = f"log-probs differ by {gap:.1e} nat, gradients by {gradient_gap:.1e} of their norm"
    return ForwardCheck(agrees, gap, gradient_gap, reason)


def choose_attention(policy: Policy, setting: str) -> str:
    """Set ``policy.attention`` by ``model.attention`` and the check; returns a line for the user.

    Raises ConfigError when 'grouped' was asked for and is wrong for this model.
    """
    if setting == "plain":
        policy.attention = "plain"
        return "attention: plain, one row at a time (as configured)"
    check = verify_forward(policy)
    family = policy.model.config.model_type
    if check.agrees:
        policy.attention = "grouped"
        return f"attention: packed groups, checked against the plain pass: {check.reason}"
    if setting == "grouped":
        raise ConfigError(
            f"model.attention = 'grouped' is wrong for the family '{family}': {check.reason}. Use 'auto' or 'plain'."
        )
    policy.attention = "plain"
    return f"attention: plain, one row at a time, because packing is wrong for the family '{family}': {check.reason}"


def _check_batch(vocabulary: int) -> PackedBatch:
    """Two prompts, one shared by completions of three lengths."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=generator).tolist()

    shared, alone = ids(7), ids(4)
    parts = [(shared, ids(5)), (shared, ids(1)), (shared, ids(3)), (alone, ids(6))]
    rows = [Row(p, c, [True] * len(c), 1.0, [0.0] * len(c)) for p, c in parts]
    return pack(rows, range(len(rows)), max_tokens=1024)[0]


def _probe(
    policy: Policy, batch: PackedBatch, implementation: str, replay: Tensor | None = None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Log-probs, the gradient of their sum and the experts, without touching any parameter's .grad."""
    before = policy.attention
    policy.attention = implementation
    try:
        scored = score(policy, batch, replay=replay)
    finally:
        policy.attention = before
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(scored.logprobs.sum(), parameters, allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return scored.logprobs.detach(), found, scored.experts
