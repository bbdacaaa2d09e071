"""The default engine: the policy's own modules in inference mode, in this process.

Each distinct prompt is prefilled once, packed with others. Answers are decoded in slots of a static key/value cache;
a slot whose answer ends is refilled with the next waiting one, or filled by the last active slot, so that active
slots always are the first ones and every step works on views.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gspo.algorithm.batch import Layout
from gspo.engines.base import Engine, Progress, Request, Sampling
from gspo.engines.sampling import sample_tokens
from gspo.packing import pack_prompts
from gspo.policy import attention, moe
from gspo.policy.attention import decode_attention, grouped_attention
from gspo.policy.forward import packed_hidden, score_next
from gspo.policy.load import Policy
from gspo.policy.prepacked import prepacked
from gspo.types import Completion, FinishReason, Routing


@dataclass
class _Prompt:
    """A prefilled prompt: keys and values by layer [H_kv, P, D], the hidden state that predicts what follows, and the
    experts [P, layers, K] of a mixture."""

    length: int
    cache: dict[int, tuple[Tensor, Tensor]]
    last_hidden: Tensor
    experts: np.ndarray | None


@dataclass
class _Answer:
    """One answer on its way: where it belongs, what it has, and its uniforms, fixed in advance by its seed.

    Of a mixture: ``prompt_experts`` [P, layers, K], and ``experts`` [layers, K] where each of its tokens is predicted.
    """

    request: int
    sample: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_experts: np.ndarray | None = None
    experts: list[np.ndarray] = field(default_factory=list)


class NativeEngine(Engine):
    """``policy`` holds the weights. When ``owner`` is another policy, weights are copied from it on each publish."""

    def __init__(self, policy: Policy, *, owner: Policy | None = None, max_batch: int = 64) -> None:
        self.policy = policy
        self.owner = owner
        self.max_batch = max_batch

    def load_weights(self, version: int) -> None:
        if self.owner is not None:
            with torch.no_grad():
                pairs = zip(self.policy.model.parameters(), self.owner.model.parameters(), strict=True)
                for mine, theirs in pairs:
                    mine.copy_(theirs)
        self.policy_version = version

    @torch.inference_mode()
    def next_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return score_next(self.policy, prompt_ids, token_ids)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[list[Completion]]:
        with moe.record_routing(self.policy) as record:
            if self.policy.attention == "plain":
                return _generate_plain(self, requests, sampling, progress, record)
            session = _Session(self, requests, sampling, progress, record)
            with prepacked(self.policy.model, session.slots.count):
                return session.run()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.policy.head(hidden)

    def completion(self, answer: _Answer, reason: FinishReason) -> Completion:
        routing = None
        if answer.prompt_experts is not None:
            routing = Routing(answer.prompt_experts, np.stack(answer.experts))
        return Completion(answer.token_ids, answer.logprobs, reason, self.policy_version, routing)


def answer_uniforms(request: Request, sample: int, count: int) -> np.ndarray:
    """The uniforms of one answer; independent of slots, batch size and other answers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([*request.seed, sample]))).random(count)


def experts_since(record: moe.RoutingRecord) -> np.ndarray | None:
    """Experts [T, layers, K] of the tokens fed since the last question; None for a dense model."""
    experts, _ = record.take()
    return None if experts is None else experts.cpu().numpy()


class _Session:
    """One ``generate`` call."""

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Progress | None,
        record: moe.RoutingRecord,
    ) -> None:
        self.engine, self.requests, self.sampling, self.progress = engine, requests, sampling, progress
        self.record = record
        self.waiting: deque[_Answer] = deque(
            _Answer(r, i, answer_uniforms(request, i, sampling.max_tokens))
            for r, request in enumerate(requests)
            for i in range(request.num_samples)
        )
        self.total = len(self.waiting)
        self.done = 0
        self.results: list[list[Completion | None]] = [[None] * request.num_samples for request in requests]
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        self.device = engine.policy.device
        self.slots = _Slots(min(engine.max_batch, self.total), longest, self.device)
        self.active: list[_Answer] = []

    def run(self) -> list[list[Completion]]:
        while self.waiting or self.active:
            if self.waiting and len(self.active) < self.slots.count:
                self._admit()
            if self.active:
                self._step()
        return [[completion for completion in row if completion is not None] for row in self.results]

    def _admit(self) -> None:
        """Fill free slots; the first token of each newcomer comes from its prompt's last hidden state."""
        newcomers = [self.waiting.popleft() for _ in range(min(self.slots.count - len(self.active), len(self.waiting)))]
        self._prefill(newcomers)
        prompts = [self.prompts[tuple(self.requests[answer.request].prompt_ids)] for answer in newcomers]
        logits = self.engine.logits(torch.stack([prompt.last_hidden for prompt in prompts]))
        first = len(self.active)
        for slot, (answer, prompt) in enumerate(zip(newcomers, prompts, strict=True), first):
            self.slots.fill(slot, prompt)
            if prompt.experts is not None:
                answer.prompt_experts = prompt.experts
                answer.experts.append(prompt.experts[-1])
        self.active += newcomers
        self._take(logits, first)
        still_wanted = {tuple(self.requests[answer.request].prompt_ids) for answer in self.waiting}
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in still_wanted}

    def _prefill(self, newcomers: Sequence[_Answer]) -> None:
        keys = dict.fromkeys(tuple(self.requests[answer.request].prompt_ids) for answer in newcomers)
        missing = [key for key in keys if key not in self.prompts]
        while missing:
            chunk = [missing.pop(0)]
            while missing and sum(map(len, chunk)) + len(missing[0]) <= 4096:
                chunk.append(missing.pop(0))
            token_ids, positions, layout, last = pack_prompts(chunk)
            context = _Prefill(layout)
            hidden = packed_hidden(self.engine.policy, token_ids, positions, context)
            experts = experts_since(self.record)
            for key, group, end in zip(chunk, layout.groups, last, strict=True):
                span = slice(*group.prompt)
                cache = {layer: (k[:, span], v[:, span]) for layer, (k, v) in context.cache.items()}
                self.prompts[key] = _Prompt(len(key), cache, hidden[end], None if experts is None else experts[span])

    def _step(self) -> None:
        """One token for every active slot."""
        tokens = torch.tensor([answer.token_ids[-1] for answer in self.active])
        context = self.slots.decode_context(len(self.active))
        hidden = packed_hidden_rows(self.engine.policy, tokens, context)
        experts = experts_since(self.record)
        if experts is not None:
            for answer, chosen in zip(self.active, experts, strict=True):
                answer.experts.append(chosen)
        self._take(self.engine.logits(hidden), 0)

    def _take(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the slots from ``first`` on, and let finished answers go."""
        drawing = self.active[first:]
        uniforms = torch.tensor([answer.uniforms[len(answer.token_ids)] for answer in drawing], dtype=torch.float32)
        tokens, logprobs = sample_tokens(logits, uniforms.to(self.device), self.sampling.temperature)
        for answer, token, logprob in zip(drawing, tokens.tolist(), logprobs.tolist(), strict=True):
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
        for slot in range(len(self.active) - 1, first - 1, -1):
            reason = self.sampling.finish_reason(self.active[slot].token_ids)
            if reason is not None:
                self._finish(slot, reason)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _finish(self, slot: int, reason: FinishReason) -> None:
        answer = self.active[slot]
        self.results[answer.request][answer.sample] = self.engine.completion(answer, reason)
        self.done += 1
        last = self.active.pop()
        if slot < len(self.active):
            self.active[slot] = last
            self.slots.move(len(self.active), slot)


class _Slots:
    """The static cache: keys and values [count, H_kv, capacity, D] for each layer.

    It starts at the length of the longest prompt and grows by ``GROWTH`` tokens or a quarter when answers reach its
    end: products run over whole, contiguous blocks, and a block is never much longer than what is in it.
    """

    GROWTH = 32

    def __init__(self, count: int, capacity: int, device: torch.device) -> None:
        self.count = count
        self.capacity = capacity + self.GROWTH
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """``like`` [..., H_kv, tokens, D] gives the shape of a layer on first use."""
        if number not in self.layers:
            # zeros, not empty: masked places are read, and 0 x garbage could be NaN
            shape = (self.count, like.shape[-3], self.capacity, like.shape[-1])
            self.layers[number] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[number]

    def fill(self, slot: int, prompt: _Prompt) -> None:
        for number, (key, value) in prompt.cache.items():
            keys, values = self.layer(number, key)
            keys[slot, :, : prompt.length] = key
            values[slot, :, : prompt.length] = value
        self.lengths[slot] = prompt.length

    def move(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        for keys, values in self.layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]
        self.lengths[target] = length

    def decode_context(self, active: int) -> _Decode:
        """The context of one step; the new token of each slot goes behind its last."""
        positions = self.lengths[:active].clone()
        if int(positions.max()) >= self.capacity:
            self._grow()
        self.lengths[:active] += 1
        return _Decode(self, positions)

    def _grow(self) -> None:
        more = max(self.GROWTH, self.capacity // 4)
        self.capacity += more
        for number, pair in self.layers.items():
            longer = [F.pad(tensor, (0, 0, 0, more)) for tensor in pair]
            self.layers[number] = (longer[0], longer[1])


class _Prefill:
    """Attention of packed prompts that also keeps keys and values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.longest = max(stop - start for start, stop in (group.prompt for group in layout.groups))
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.cache[layer] = (key[0], value[0])
        return grouped_attention(query[0], key[0], value[0], self.layout, scale)[None]


class _Decode:
    """Attention of one new token a slot over its cache."""

    def __init__(self, slots: _Slots, positions: Tensor) -> None:
        self.slots, self.positions = slots, positions
        self.longest = int(positions.max()) + 1
        self.rows = torch.arange(positions.shape[0], device=positions.device)
        unwritten = torch.arange(slots.capacity, device=positions.device)[None] > positions[:, None]
        self.mask = torch.zeros(unwritten.shape, device=positions.device).masked_fill_(unwritten, -torch.inf)
        self.mask = self.mask[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.slots.layer(layer, key)
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        active = self.rows.shape[0]
        return decode_attention(query, keys[:active], values[:active], self.mask, scale)


def packed_hidden_rows(policy: Policy, token_ids: Tensor, context: _Decode) -> Tensor:
    """Hidden states [B, D] of one new token for each of B rows."""
    with policy.attention_implementation(attention.NAME):
        output = policy.backbone(
            input_ids=token_ids[:, None].to(policy.device),
            position_ids=context.positions[:, None].to(policy.device),
            attention_mask=None,
            use_cache=False,
            gspo_context=context,
        )
    return output.last_hidden_state[:, 0]


def _generate_plain(
    engine: NativeEngine,
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Progress | None,
    record: moe.RoutingRecord,
) -> list[list[Completion]]:
    """For families that packed attention does not fit: one request at a time with the model's own cache.

    The answers of a request have equal lengths at every step, so there is no padding and nothing to mask.
    """
    results: list[list[Completion]] = []
    total = sum(request.num_samples for request in requests)
    for request in requests:
        answers = [
            _Answer(len(results), i, answer_uniforms(request, i, sampling.max_tokens))
            for i in range(request.num_samples)
        ]
        reasons: list[FinishReason | None] = [None] * len(answers)
        inputs = torch.tensor([list(request.prompt_ids)] * len(answers)).to(engine.policy.device)
        cache = None
        for step in range(sampling.max_tokens):
            with engine.policy.attention_implementation("sdpa" if engine.policy.model._supports_sdpa else "eager"):
                output = engine.policy.model(input_ids=inputs, cache=cache, use_cache=True)
            cache = output.cache
            _keep_experts(answers, reasons, experts_since(record), inputs.shape[1])
            uniforms = torch.tensor([answer.uniforms[step] for answer in answers], dtype=torch.float32)
            tokens, logprobs = sample_tokens(
                output.logits[:, -1], uniforms.to(engine.policy.device), sampling.temperature
            )
            for number, answer in enumerate(answers):
                if reasons[number] is None:
                    answer.token_ids.append(int(tokens[number]))
                    answer.logprobs.append(float(logprobs[number]))
                    reasons[number] = sampling.finish_reason(answer.token_ids)
            if all(reasons):
                break
            inputs = tokens[:, None]
        results.append([engine.completion(a, r or "length") for a, r in zip(answers, reasons, strict=True)])
        if progress is not None:
            progress(sum(map(len, results)), total)
    return results


def _keep_experts(
    answers: Sequence[_Answer], reasons: Sequence[FinishReason | None], experts: np.ndarray | None, fed: int
) -> None:
    """Share out experts [answers * fed, layers, K] of one call: a whole prompt at first, then a token each."""
    if experts is None:
        return
    for answer, reason, row in zip(answers, reasons, np.split(experts, len(answers)), strict=True):
        if answer.prompt_experts is None:
            answer.prompt_experts = row
        if reason is None:
            answer.experts.append(row[-1])
