"""Rows of token ids -> the packed forward passes of one update.

A group's prompt is stored once and its completions after it. Passes hold at most ``max_tokens`` tokens and are
balanced against each other; how rows are spread over passes changes rounding, never the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

from gspo.algorithm.batch import Block, GroupSpan, Layout, PackedBatch, StepBatch
from gspo.errors import PackingError
from gspo.types import Routing

MAX_PADDING = 0.25
"""Largest share of padding in an attention block; more and the block is cut in two."""


@dataclass(frozen=True)
class Row:
    """One rollout, ready to train on: ``L`` tokens after the prompt.

    ``completion_mask``, ``rollout_logprobs`` and ``old_logprobs`` have length L; ``old_logprobs`` None means that the
    pass itself supplies them. ``routing``: the experts that the engine used, if it has any and reports them;
    ``old_routing``: those of the pass that gave ``old_logprobs``. Rows with equal ``prompt_ids``, and equal experts
    there, share the prompt's forward pass.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    completion_mask: Sequence[bool]
    advantage: float
    rollout_logprobs: Sequence[float]
    old_logprobs: Sequence[float] | None = None
    routing: Routing | None = None
    old_routing: Routing | None = None

    def check(self, number: int) -> None:
        """Raise PackingError when the row contradicts itself."""
        lengths = {"completion_mask": len(self.completion_mask), "rollout_logprobs": len(self.rollout_logprobs)}
        if self.old_logprobs is not None:
            lengths["old_logprobs"] = len(self.old_logprobs)
        routings = {"routing": self.routing, "old_routing": self.old_routing}
        for name, routing in routings.items():
            if routing is not None:
                lengths[f"{name}.completion"] = len(routing.completion)
        for name, length in lengths.items():
            if length != len(self.token_ids):
                raise PackingError(
                    f"Row {number}: {name} has {length} entries for {len(self.token_ids)} completion tokens; "
                    "they must be equal. Cut and merge all per-token lists together."
                )
        if not self.prompt_ids or not self.token_ids:
            raise PackingError(f"Row {number} has an empty prompt or completion; leave such rows out before packing.")
        for routing in routings.values():
            if routing is not None:
                self._check_prompt_experts(routing, number)

    def _check_prompt_experts(self, routing: Routing, number: int) -> None:
        if len(routing.prompt) != len(self.prompt_ids):
            raise PackingError(
                f"Row {number}: routing.prompt has {len(routing.prompt)} entries for {len(self.prompt_ids)} prompt "
                "tokens; they must be equal. Cut and merge experts together with the tokens."
            )
        if not np.array_equal(routing.prompt[-1], routing.completion[0]):
            raise PackingError(
                f"Row {number}: the first completion token is predicted at the prompt's last position, and its experts "
                "differ from those given there; the experts are misaligned with the tokens."
            )


def pack_step(rows: Sequence[Row], *, max_tokens: int, share_prompts: bool = True) -> StepBatch:
    """Pack the rows of one update.

    Rows with advantage 0 add nothing to the gradient: they are left out of the forward passes and stay in the
    denominators. ``share_prompts=False`` repeats the prompt for every row (same gradient, more work).

    Raises PackingError when a row's parts disagree, or prompt + completion of one row exceed ``max_tokens``.
    """
    for number, row in enumerate(rows):
        row.check(number)
    counted = [row for row in rows if any(row.completion_mask)]
    with_signal = [n for n, row in enumerate(rows) if row.advantage != 0.0 and any(row.completion_mask)]
    return StepBatch(
        batches=tuple(pack(rows, with_signal, max_tokens=max_tokens, share_prompts=share_prompts)),
        num_sequences=len(counted),
        num_completion_tokens=sum(sum(row.completion_mask) for row in counted),
    )


def pack(
    rows: Sequence[Row], numbers: Sequence[int], *, max_tokens: int, share_prompts: bool = True
) -> list[PackedBatch]:
    """Pack the rows with these numbers into as few balanced passes as fit ``max_tokens``."""
    pieces = _pieces(rows, numbers, max_tokens, share_prompts)
    return [_build(rows, bin_pieces) for bin_pieces in _balance(rows, pieces, max_tokens)]


def _cost(rows: Sequence[Row], piece: Sequence[int]) -> int:
    """Forward tokens of rows that share one prompt."""
    return len(rows[piece[0]].prompt_ids) + sum(len(rows[n].token_ids) - 1 for n in piece)


def _pieces(rows: Sequence[Row], numbers: Sequence[int], max_tokens: int, share_prompts: bool) -> list[list[int]]:
    """Rows by prompt, cut where one prompt's rows exceed max_tokens."""
    by_prompt: dict[object, list[int]] = {}
    for n in numbers:
        by_prompt.setdefault(_shared(rows[n]) if share_prompts else n, []).append(n)
    pieces: list[list[int]] = []
    for members in by_prompt.values():
        piece: list[int] = []
        share = _even_share(rows, members, max_tokens)
        for n in members:
            if _cost(rows, [n]) > max_tokens:
                raise PackingError(
                    f"Row {n} needs {_cost(rows, [n])} tokens (prompt {len(rows[n].prompt_ids)} + completion "
                    f"{len(rows[n].token_ids)}), more than batch.max_tokens = {max_tokens}. Raise batch.max_tokens, or "
                    "lower task.max_prompt_tokens or rollout.max_tokens."
                )
            if piece and _cost(rows, [*piece, n]) > share:
                pieces.append(piece)
                piece = []
            piece.append(n)
        pieces.append(piece)
    return pieces


def _shared(row: Row) -> object:
    """Rows for which this is equal can share a prompt."""
    experts = (None if routing is None else routing.prompt.tobytes() for routing in (row.routing, row.old_routing))
    return tuple(row.prompt_ids), *experts


def _even_share(rows: Sequence[Row], members: Sequence[int], max_tokens: int) -> float:
    """What a piece of these rows may cost, so that as few pieces as fit are equally large."""
    prompt = len(rows[members[0]].prompt_ids)
    completions = [len(rows[n].token_ids) - 1 for n in members]
    if prompt + sum(completions) <= max_tokens:
        return max_tokens
    pieces = ceil(sum(completions) / max(max_tokens - prompt, 1))
    return min(max_tokens, prompt + sum(completions) / pieces + max(completions) / 2)


def _balance(rows: Sequence[Row], pieces: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Longest piece first into the emptiest pass."""
    total = sum(_cost(rows, piece) for piece in pieces)
    bins: list[list[list[int]]] = [[] for _ in range(ceil(total / max_tokens))]
    loads = [0] * len(bins)
    for piece in sorted(pieces, key=lambda piece: -_cost(rows, piece)):
        cost = _cost(rows, piece)
        emptiest = min(range(len(bins)), key=loads.__getitem__)
        if loads[emptiest] + cost > max_tokens:
            bins.append([])
            loads.append(0)
            emptiest = len(bins) - 1
        bins[emptiest].append(piece)
        loads[emptiest] += cost
    return [content for content in bins if content]


def _build(rows: Sequence[Row], pieces: list[list[int]]) -> PackedBatch:
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    groups: list[GroupSpan] = []
    order: list[int] = []
    for piece in pieces:
        prompt = rows[piece[0]].prompt_ids
        start = len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        prompt_end = len(tokens)
        spans: list[tuple[int, int]] = []
        for n in piece:
            inputs = rows[n].token_ids[:-1]
            first = len(tokens)
            tokens += inputs
            positions += range(len(prompt), len(prompt) + len(inputs))
            spans.append((first, len(tokens)))
            predict += [prompt_end - 1, *range(first, len(tokens))]
        groups.append(GroupSpan((start, prompt_end), tuple(spans)))
        order += piece
    lengths = [len(rows[n].token_ids) for n in order]
    old = [rows[n].old_logprobs for n in order]
    known_old = [values for values in old if values is not None]
    if known_old and len(known_old) != len(old):
        raise PackingError("Some rows of one pass have old_logprobs and others do not; give them to all or to none.")
    return PackedBatch(
        token_ids=torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        layout=_layout(groups),
        predict_index=torch.tensor(predict),
        targets=torch.tensor([token for n in order for token in rows[n].token_ids]),
        completion_mask=torch.tensor([keep for n in order for keep in rows[n].completion_mask], dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        advantages=torch.tensor([rows[n].advantage for n in order], dtype=torch.float32),
        rollout_logprobs=torch.tensor([x for n in order for x in rows[n].rollout_logprobs], dtype=torch.float32),
        old_logprobs=torch.tensor([x for values in known_old for x in values], dtype=torch.float32)
        if known_old
        else None,
        rows=tuple(order),
        rollout_experts=_experts(pieces, [row.routing for row in rows]),
        old_experts=_experts(pieces, [row.old_routing for row in rows]),
    )


def _experts(pieces: list[list[int]], routings: Sequence[Routing | None]) -> torch.Tensor | None:
    """[T, layers, K] for each forward token, laid out as ``_build`` lays out the tokens."""
    parts: list[np.ndarray] = []
    if all(routings[n] is None for piece in pieces for n in piece):
        return None
    for piece in pieces:
        for place, routing in enumerate(routings[n] for n in piece):
            if routing is None:
                raise PackingError("Some rows of one pass have routing and others do not; give it to all or to none.")
            parts += [routing.completion[1:]] if place else [routing.prompt, routing.completion[1:]]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise PackingError("The rows of one pass have experts of different models; give those of the policy alone.")
    return torch.from_numpy(np.concatenate(parts))


def pack_prompts(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, Layout, list[int]]:
    """Prompts end to end, nothing after them: (token_ids [T], position_ids [T], layout, last position of each)."""
    tokens: list[int] = []
    positions: list[int] = []
    groups: list[GroupSpan] = []
    for prompt in prompts:
        start = len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        groups.append(GroupSpan((start, len(tokens)), ()))
    last = [group.prompt[1] - 1 for group in groups]
    return torch.tensor(tokens), torch.tensor(positions), _layout(groups), last


def _layout(groups: Sequence[GroupSpan]) -> Layout:
    blocks: list[Block] = []
    for group in groups:
        blocks.append(_block((group.prompt[0], group.prompt[0]), [group.prompt]))
        blocks += [_block(group.prompt, members) for members in _similar(group.completions)]
    return Layout(tuple(groups), tuple(blocks))


def _similar(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Completions by length, longest first, cut where padding would exceed its share; empty ones left out."""
    spans = sorted((span for span in spans if span[1] > span[0]), key=lambda span: (span[0] - span[1], span[0]))
    runs: list[list[tuple[int, int]]] = []
    for span in spans:
        if runs:
            longest = runs[-1][0][1] - runs[-1][0][0]
            filled = sum(stop - start for start, stop in runs[-1]) + span[1] - span[0]
            if filled >= (1 - MAX_PADDING) * longest * (len(runs[-1]) + 1):
                runs[-1].append(span)
                continue
        runs.append([span])
    return runs


def _block(prompt: tuple[int, int], members: Sequence[tuple[int, int]]) -> Block:
    starts = torch.tensor([start for start, _ in members])[:, None]
    lengths = torch.tensor([stop - start for start, stop in members])[:, None]
    longest, width = int(lengths.max()), prompt[1] - prompt[0]
    offset = torch.arange(longest)[None]
    valid = offset < lengths
    index = torch.where(valid, starts + offset, starts)
    future = torch.ones(longest, longest, dtype=torch.bool).triu(1)
    mask = torch.zeros(longest, width + longest)
    mask[:, width:].masked_fill_(future, -torch.inf)
    first = int(index[0, 0])
    end_to_end = torch.equal(index.flatten(), torch.arange(first, first + index.numel()))
    return Block(prompt, index, valid, mask, end_to_end)
