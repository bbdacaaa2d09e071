"""The native engine: its log-probabilities are the trainer's, and every way an answer can end is decided."""

from __future__ import annotations

import pytest
import torch

from gspo.chat import ChatFormat
from gspo.engines.base import Request, Sampling
from gspo.engines.native import NativeEngine, answer_uniforms
from gspo.packing import Row, pack
from gspo.policy.forward import score, score_plain
from gspo.policy.load import Policy
from gspo.types import Completion

NO_END = frozenset({10_000})
PROMPTS = [[3, 14, 15], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]


def sampling(
    max_tokens: int = 12, temperature: float = 1.0, end: frozenset[int] = NO_END, **kwargs: object
) -> Sampling:
    return Sampling(max_tokens, temperature, end, **kwargs)  # type: ignore[arg-type]


def requests(num_samples: int = 3, seed: int = 0) -> list[Request]:
    return [Request(ids, num_samples, (seed, place)) for place, ids in enumerate(PROMPTS)]


def trainer_logprobs(
    policy: Policy, prompt: list[int], completion: Completion, temperature: float, plain: bool
) -> list[float]:
    ids = completion.token_ids
    batch = pack([Row(prompt, ids, [True] * len(ids), 1.0, completion.logprobs)], [0], max_tokens=10_000)[0]
    scorer = score_plain if plain else score
    return scorer(policy, batch, temperature=temperature).logprobs.tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("max_batch", [2, 5, 64])
def test_logprobs_equal_the_trainers_at_any_temperature(
    tiny_policy: Policy, temperature: float, max_batch: int
) -> None:
    """Also while slots are refilled and moved: with two slots every answer lands where another one was."""
    end = frozenset(range(20))  # a fifth of the vocabulary ends an answer, so lengths differ
    engine = NativeEngine(tiny_policy, max_batch=max_batch)
    rows = engine.generate(requests(6), sampling(12, temperature, end))
    lengths = {len(completion.token_ids) for row in rows for completion in row}
    assert len(lengths) > 3
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for completion in row:
            for plain in (False, True):
                expected = trainer_logprobs(tiny_policy, prompt, completion, temperature, plain)
                assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_shift_by_one_would_be_seen(tiny_policy: Policy) -> None:
    """The check above can fail: log-probs moved by one place are far off (prime-rl#1525, unsloth#2736)."""
    completion = NativeEngine(tiny_policy).generate(requests(1), sampling())[0][0]
    expected = trainer_logprobs(tiny_policy, PROMPTS[0], completion, 1.0, True)
    shifted = [*completion.logprobs[1:], completion.logprobs[0]]
    assert max(abs(a - b) for a, b in zip(shifted, expected, strict=True)) > 0.01


def test_answers_do_not_depend_on_slots_or_company(tiny_policy: Policy) -> None:
    together = NativeEngine(tiny_policy, max_batch=64).generate(requests(4), sampling(end=frozenset(range(20))))
    squeezed = NativeEngine(tiny_policy, max_batch=3).generate(requests(4), sampling(end=frozenset(range(20))))
    alone = NativeEngine(tiny_policy).generate(requests(4)[1:2], sampling(end=frozenset(range(20))))
    assert [[c.token_ids for c in row] for row in together] == [[c.token_ids for c in row] for row in squeezed]
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in together[1]]


def test_seeds_decide(tiny_policy: Policy) -> None:
    engine = NativeEngine(tiny_policy)
    first, again, other = (engine.generate(requests(2, seed), sampling()) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[0][0].token_ids != first[0][1].token_ids
    assert (answer_uniforms(requests()[0], 0, 4) != answer_uniforms(requests()[0], 1, 4)).all()


def test_several_end_tokens_end_and_are_kept(tiny_policy: Policy) -> None:
    """The end token was sampled, so it is trained on; which one it was does not matter (trl#4970)."""
    end = frozenset({7, 20, 33, 41, 55, 60, 71, 80})
    rows = NativeEngine(tiny_policy).generate(requests(20), sampling(40, 1.0, end))
    ended = [c for row in rows for c in row if c.finish_reason == "stop"]
    assert len({c.token_ids[-1] for c in ended}) > 2
    for completion in ended:
        assert completion.token_ids[-1] in end
        assert not end & set(completion.token_ids[:-1])
        assert len(completion.token_ids) == len(completion.logprobs)


def test_an_answer_cut_at_the_limit_gets_no_invented_end(tiny_policy: Policy) -> None:
    """ms-swift#6618, torchtune#2967."""
    rows = NativeEngine(tiny_policy).generate(requests(2), sampling(5))
    for completion in (c for row in rows for c in row):
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == len(completion.logprobs) == 5


def test_an_empty_answer_is_its_end_token(tiny_policy: Policy) -> None:
    everything = frozenset(range(200))
    rows = NativeEngine(tiny_policy).generate(requests(2), sampling(5, 1.0, everything))
    for completion in (c for row in rows for c in row):
        assert (len(completion.token_ids), completion.finish_reason) == (1, "stop")


def test_stop_strings_end_and_are_cut_from_the_text(tiny_policy: Policy) -> None:
    tokenizer = tiny_policy.tokenizer
    chat = ChatFormat(tokenizer, stop=("a", "zz"), end_token_ids=frozenset({tokenizer.eos_token_id}))
    rows = NativeEngine(tiny_policy).generate(
        requests(40), sampling(60, 1.0, chat.end_token_ids, should_stop=chat.ends_with_stop)
    )
    stopped = [
        c for row in rows for c in row if c.finish_reason == "stop" and c.token_ids[-1] != tokenizer.eos_token_id
    ]
    assert len(stopped) > 10
    for completion in stopped:
        whole = tokenizer.decode(completion.token_ids)
        assert whole.endswith(("a", "zz"))
        assert "a" not in chat.decode(completion.token_ids)


def test_greedy(tiny_policy: Policy) -> None:
    rows = NativeEngine(tiny_policy).generate(requests(2), sampling(6, 0.0))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert row[0] == row[1]
        ids = list(prompt)
        for token in row[0].token_ids:
            logits = tiny_policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)


def test_decode_steps_equal_the_longest_chain_of_answers(tiny_policy: Policy) -> None:
    """Counted: with a slot for every answer there is one model call a token of the longest, plus one prefill."""
    engine = NativeEngine(tiny_policy, max_batch=64)
    calls: list[int] = []
    hook = tiny_policy.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    rows = engine.generate(requests(5), sampling(9, 1.0, frozenset(range(20))))
    hook.remove()
    longest = max(len(c.token_ids) for row in rows for c in row)
    assert len(calls) == 1 + (longest - 1)
    assert calls[0] == sum(map(len, PROMPTS)), "each distinct prompt is prefilled once"
    assert calls[1:] == sorted(calls[1:], reverse=True), "finished answers leave the batch"
    tokens = sum(len(c.token_ids) for row in rows for c in row)
    assert sum(calls[1:]) == tokens - 15, "no position is computed for an answer that has ended"


def test_plain_generation_agrees_with_packed(tiny_policy: Policy) -> None:
    """The fall-back for families that packed attention does not fit gives the same answers."""
    end = frozenset(range(20))
    packed = NativeEngine(tiny_policy).generate(requests(4), sampling(10, 1.0, end))
    tiny_policy.attention = "plain"
    plain = NativeEngine(tiny_policy).generate(requests(4), sampling(10, 1.0, end))
    for first, second in zip((c for row in packed for c in row), (c for row in plain for c in row), strict=True):
        assert first.token_ids == second.token_ids
        assert first.finish_reason == second.finish_reason
        assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


def test_next_logprobs_are_the_plain_ones(tiny_policy: Policy) -> None:
    ids, asked = [5, 17, 40, 2, 2, 71], [3, 71, 0]
    logits = tiny_policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    expected = logits[-1].log_softmax(-1)[asked].tolist()
    assert NativeEngine(tiny_policy).next_logprobs(ids, asked) == pytest.approx(expected, abs=1e-5)


def test_progress_counts_answers(tiny_policy: Policy) -> None:
    seen: list[tuple[int, int]] = []
    NativeEngine(tiny_policy).generate(requests(2), sampling(4), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    assert seen == sorted(seen)
