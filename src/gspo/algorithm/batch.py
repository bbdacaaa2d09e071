"""The tensor carriers of one update, and what always holds for them.

Axis letters: T tokens of one forward pass, S sequences, N completion-region tokens of the S sequences laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupSpan:
    """Where one prompt and the completions that share it lie in the forward pass; half-open token ranges.

    ``completions`` lie right behind the prompt, end to end. A completion's last token predicts nothing and is not in
    the forward pass, so a completion of one token has an empty range.
    """

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Block:
    """Rows of one group, of similar length, that attend in one go: each to the group's prompt and to itself.

    ``prompt``: the prompt's token range (P tokens; empty when the row is itself a prompt). ``index`` int64[s, L]:
    forward positions, padding points at the row's first token; ``valid`` bool[s, L]: False at padding. ``mask``
    f32[L, P + L]: 0 where a row's token may look, -inf elsewhere. ``is_slice``: the rows are equally long and lie end
    to end.
    """

    prompt: tuple[int, int]
    index: Tensor
    valid: Tensor
    mask: Tensor
    is_slice: bool


@dataclass(frozen=True)
class Layout:
    """Who attends to whom: a completion token sees its prompt and its own past, nothing else.

    ``blocks`` cover every token of the pass once; a prompt's block comes before its completions'.
    """

    groups: tuple[GroupSpan, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass and the objective's view of it.

    Forward side: ``token_ids``, ``position_ids`` int64[T] and ``layout``; each prompt once, its completions after it.
    Objective side: ``predict_index`` int64[N], the forward position whose hidden state predicts each completion token
    (the prompt's last position for first tokens); ``targets`` int64[N], those tokens; ``completion_mask`` bool[N],
    True where the policy sampled; ``cu_seqlens`` int32[S+1]; ``advantages`` f32[S]; ``rollout_logprobs`` f32[N];
    ``old_logprobs`` f32[N] or None, which means: this pass is made with the weights that sampled, so its own
    log-probabilities are the old ones. ``rows``: which row of the update each sequence is.
    Mixture of experts, both uint8 or int16 [T, layers, K] or None: ``rollout_experts`` is what the engine used,
    ``old_experts`` what the trainer's routers chose in the pass that gave ``old_logprobs``.

    Example: a prompt of 3 tokens with completions of 2 and 1 tokens gives T = 3 + 1 + 0 forward tokens, N = 3,
    ``predict_index = [2, 3, 2]``, ``cu_seqlens = [0, 2, 3]``.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: Layout
    predict_index: Tensor
    targets: Tensor
    completion_mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    rows: tuple[int, ...]
    rollout_experts: Tensor | None = None
    old_experts: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class StepBatch:
    """The passes of one update and its denominators, which count the whole update, left-out sequences included.

    ``num_sequences``: sequences with at least one unmasked token; ``num_completion_tokens``: their unmasked tokens.
    """

    batches: tuple[PackedBatch, ...]
    num_sequences: int
    num_completion_tokens: int


def split_by_sequence(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Cut a [N] tensor into its S sequences."""
    return list(torch.split(values, cu_seqlens.diff().tolist()))
