"""``builtin:tiny`` and ``builtin:tiny-moe``: fixed random weights, tokens that are characters.

A Llama of two layers, and a Qwen3-MoE of four with 8 experts, 2 of them for each token. Small enough to train on one
core in seconds: the smoke test of everything, and the demo's stand-in when the real model cannot be had.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

NAME = "builtin:tiny"
MOE_NAME = "builtin:tiny-moe"
SPECIAL = ("<unk>", "<user>", "<assistant>", "<system>", "<end>")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build(name: str = NAME) -> tuple[Any, Any]:
    """(model, tokenizer); the same weights every time, whatever the caller's random state."""
    tokenizer = build_tokenizer()
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,  # an index would freeze that token's embedding at zero
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250728)
        model = BUILDERS[name](shared)
    return model, tokenizer


def _dense(shared: dict[str, Any]) -> Any:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **shared))


def _mixture(shared: dict[str, Any]) -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=4, head_dim=16, **experts, **shared))


BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {NAME: _dense, MOE_NAME: _mixture}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character or newline, and a chat template of role marks."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        chat_template=TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    )
