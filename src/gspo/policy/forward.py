"""The one place that calls the model to score tokens, and the check at start that the packed call is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithm.batch import PackedBatch
from gspo.algorithm.logprobs import TokenLogprobs, plain_logprobs, token_logprobs
from gspo.errors import ConfigError
from gspo.packing import Row, pack
from gspo.policy import attention
from gspo.policy.load import Policy

TOLERANCE = 1e-4
"""Largest log-probability difference (nats) between packed and plain in float32 that is taken for rounding."""
GRADIENT_TOLERANCE = 1e-3
"""The same for the parameter gradient, relative to its norm."""


def score(
    policy: Policy, batch: PackedBatch, *, temperature: float = 1.0, vocab_chunk: int = 2048, entropy: bool = True
) -> TokenLogprobs:
    """Log-probability (nats, float32) and entropy of every completion token of a pass, at ``temperature``.

    Shapes: both [N]. With gradient when grad mode is on. Packed where the policy says 'grouped'; else one row at a time
    with the model's own attention.
    """
    policy.model.eval()  # dropout off in every pass: old and new log-probs must come from one function
    if policy.attention == "plain":
        return score_plain(policy, batch, temperature=temperature)
    hidden = packed_hidden(policy, batch.token_ids, batch.position_ids, attention.PackedAttention(batch.layout))
    head = policy.head
    return token_logprobs(
        hidden[batch.predict_index.to(hidden.device)],
        head.weight,
        batch.targets.to(hidden.device),
        temperature=temperature,
        bias=getattr(head, "bias", None),
        vocab_chunk=vocab_chunk,
        entropy=entropy,
    )


def packed_hidden(
    policy: Policy, token_ids: Tensor, position_ids: Tensor, context: attention.AttentionContext
) -> Tensor:
    """Last hidden states [T, D] of one packed row.

    No mask and no cache object: with either, transformers silently lets packed rows see each other.
    """
    with policy.attention_implementation(attention.NAME):
        output = policy.backbone(
            input_ids=token_ids[None].to(policy.device),
            position_ids=position_ids[None].to(policy.device),
            attention_mask=None,
            use_cache=False,
            gspo_context=context,
        )
    return output.last_hidden_state[0]


def score_plain(policy: Policy, batch: PackedBatch, *, temperature: float = 1.0) -> TokenLogprobs:
    """The oracle and fall-back: each row on its own, prompt repeated, the model's own attention and logits."""
    scored = []
    for prompt, completion in _rows(batch):
        length = completion.shape[0]
        with policy.attention_implementation("sdpa" if policy.model._supports_sdpa else "eager"):
            inputs = torch.cat([prompt, completion[:-1]])[None].to(policy.device)
            logits = policy.model(input_ids=inputs, use_cache=False).logits[0, -length:]
        scored.append(plain_logprobs(logits, completion.to(policy.device), temperature))
    entropies = [values.entropy for values in scored if values.entropy is not None]
    return TokenLogprobs(torch.cat([values.logprobs for values in scored]), torch.cat(entropies))


def _rows(batch: PackedBatch) -> list[tuple[Tensor, Tensor]]:
    """(prompt ids, completion ids) of every sequence, read back from the packed layout."""
    rows = []
    bounds = batch.cu_seqlens.tolist()
    sequence = 0
    for group in batch.layout.groups:
        for _ in group.completions:
            completion = batch.targets[bounds[sequence] : bounds[sequence + 1]]
            rows.append((batch.token_ids[group.prompt[0] : group.prompt[1]], completion))
            sequence += 1
    return rows


@dataclass(frozen=True)
class ForwardCheck:
    """Packed against plain on a few short rows. ``logprob_gap`` in nats; ``gradient_gap`` relative to the norm."""

    agrees: bool
    logprob_gap: float
    gradient_gap: float
    reason: str


def verify_forward(policy: Policy) -> ForwardCheck:
    """Compare log-probabilities and parameter gradients of the packed and the plain pass; changes nothing.

    Made on float32 weights, before they are rounded to the compute precision: in bfloat16 rounding alone moves a
    log-probability by 0.1, which would hide a leak between rows. Families differ in what they do with positions, masks
    and keyword arguments, and the failures are silent.
    """
    batch = _check_batch(policy.model.config.get_text_config().vocab_size)
    try:
        packed, packed_gradient = _probe(policy, batch, "grouped")
    except (attention.UnsupportedAttention, TypeError, AttributeError) as error:
        return ForwardCheck(False, float("nan"), float("nan"), str(error))
    plain, plain_gradient = _probe(policy, batch, "plain")
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


def _probe(policy: Policy, batch: PackedBatch, implementation: str) -> tuple[Tensor, list[Tensor]]:
    """Log-probs and the gradient of their sum, without touching any parameter's .grad."""
    before = policy.attention
    policy.attention = implementation
    try:
        logprobs = score(policy, batch).logprobs
    finally:
        policy.attention = before
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True)
    return logprobs.detach(), [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
    ]
