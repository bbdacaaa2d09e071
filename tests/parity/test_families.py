"""Packed groups against one row at a time, log-probs and gradients, on tiny random models of each family."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.engines.base import Request, Sampling
from gspo.engines.native import NativeEngine
from gspo.errors import ConfigError
from gspo.policy.forward import choose_attention, verify_forward
from gspo.policy.load import Policy
from gspo.policy.tiny import build_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
}
PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": {},
    "olmoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "phi3": {},
    "smollm3": {},
    "starcoder2": {},
    "glm4": {},
    "granite": {"logits_scaling": 1.0},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"sliding_window": 128}, "softcap"),
    "granite": ({"logits_scaling": 4.0}, "differ by"),
    "deepseek_v3": (DEEPSEEK | {"v_head_dim": 6}, "values of another width"),
}


def build(family: str, extra: dict[str, Any]) -> Policy:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(family, **(SMALL | extra))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # random models are near-uniform: make what a row sees matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return Policy(model, build_tokenizer(), family, torch.float32)


@pytest.mark.parametrize("family", PACKED)
def test_packed_is_right(family: str) -> None:
    policy = build(family, PACKED[family])
    check = verify_forward(policy)
    assert check.agrees, check.reason
    assert check.logprob_gap < 2e-5 and check.gradient_gap < 1e-4, check.reason
    assert "packed groups" in choose_attention(policy, "auto")


@pytest.mark.parametrize("family", PLAIN)
def test_what_packing_does_not_fit_falls_back_and_says_why(family: str) -> None:
    extra, reason = PLAIN[family]
    policy = build(family, extra)
    message = choose_attention(policy, "auto")
    assert policy.attention == "plain"
    assert family in message and reason in message
    with pytest.raises(ConfigError, match=f"'grouped' is wrong for the family '{family}'"):
        choose_attention(policy, "grouped")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma2", "opt", "deepseek_v3"])
def test_every_family_samples_with_the_trainers_logprobs(family: str) -> None:
    """Packed or plain, what the engine reports is the model's own log-prob of what it sampled."""
    policy = build(family, PACKED.get(family) or PLAIN[family][0])
    choose_attention(policy, "auto")
    prompt = [7, 8, 9]
    sampling = Sampling(6, 0.8, frozenset({4}))
    (row,) = NativeEngine(policy).generate([Request(prompt, 3, (0,))], sampling)
    for completion in row:
        ids = completion.token_ids
        logits = policy.model(input_ids=torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0, -len(ids) :]
        expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_sliding_window_shorter_than_the_rows_is_not_ignored() -> None:
    policy = build("mistral", {"sliding_window": 4})
    check = verify_forward(policy)
    assert not check.agrees and "sliding window of 4" in check.reason


def test_transformers_is_the_version_checked() -> None:
    assert transformers.__version__.split(".")[0] == "5"
