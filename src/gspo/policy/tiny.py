"""``builtin:tiny`` and ``builtin:tiny-moe``: fixed random weights, tokens that are characters.

A Llama of two layers, and a Qwen3-MoE of four with 8 experts, 2 of them for each token. Small enough to train on one
core in seconds: the smoke test of everything, and the demo's stand-in when the real model cannot be had. Other sizes
are in the name, for models that ``gspo coldstart`` brings up: ``builtin:tiny-4x128`` has 4 layers of width 128,
``builtin:tiny-moe-12x64-4of32`` uses 4 of 32 experts for each token.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.errors import ConfigError

NAME = "builtin:tiny"
MOE_NAME = "builtin:tiny-moe"
SPECIAL = ("<unk>", "<user>", "<assistant>", "<system>", "<end>")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """``experts`` 0: dense. The experts of a token are together as wide as the dense model's layer between."""

    layers: int
    width: int
    active: int = 0
    experts: int = 0


def size(name: str) -> Size | None:
    """Of a built-in model; None if the name is not one. Raises ConfigError for a size that cannot be built."""
    known = {NAME: Size(2, 64), MOE_NAME: Size(4, 64, 2, 8)}.get(name)
    if known or not name.startswith(NAME):
        return known
    found = re.fullmatch(re.escape(NAME) + r"(?:-(\d+)x(\d+)|-moe-(\d+)x(\d+)-(\d+)of(\d+))", name)
    if found is None:
        raise ConfigError(
            f"model.path: {name!r} is not a built-in model. There is {NAME!r} and {MOE_NAME!r}; with sizes "
            "'builtin:tiny-4x128' (4 layers of width 128) or 'builtin:tiny-moe-12x64-4of32' (4 of 32 experts a token)."
        )
    wanted = Size(*(int(number) for number in found.groups() if number is not None))
    mixture = "moe" in name
    if wanted.layers < 1 or wanted.width < 32 or wanted.width % 32:
        raise ConfigError(f"model.path: {name!r} needs at least one layer and a width that is a multiple of 32.")
    if mixture and not (1 <= wanted.active <= wanted.experts and 2 * wanted.width % wanted.active == 0):
        raise ConfigError(
            f"model.path: {name!r} needs at least as many experts as are used for a token, and a number of those that "
            f"divides twice the width, {2 * wanted.width}."
        )
    return wanted


def build(name: str = NAME) -> tuple[Any, Any]:
    """(model, tokenizer); the same weights every time, whatever the caller's random state."""
    tokenizer = build_tokenizer()
    wanted = size(name) or Size(2, 64)
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": wanted.width,
        "intermediate_size": 2 * wanted.width,
        "num_hidden_layers": wanted.layers,
        "num_attention_heads": wanted.width // 16,
        "num_key_value_heads": wanted.width // 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,  # an index would freeze that token's embedding at zero
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250728)
        return _mixture(wanted, shared) if wanted.experts else LlamaForCausalLM(LlamaConfig(**shared)), tokenizer


def _mixture(wanted: Size, shared: dict[str, Any]) -> Any:
    experts = {
        "num_experts": wanted.experts,
        "num_experts_per_tok": wanted.active,
        "moe_intermediate_size": 2 * wanted.width // wanted.active,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=16, **experts, **shared))


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
