"""``builtin:tiny``: a two-layer Llama with fixed random weights whose tokens are characters.

Small enough to train on one core in seconds: the smoke test of everything, and the demo's stand-in when the real
model cannot be had.
"""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "builtin:tiny"
SPECIAL = ("<unk>", "<user>", "<assistant>", "<system>", "<end>")
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build() -> tuple[Any, Any]:
    """(model, tokenizer); the same weights every time, whatever the caller's random state."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20250728)
        model = LlamaForCausalLM(config)
    return model, tokenizer


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
