"""A real vLLM server, from the environment ``.venv-vllm`` at the top of the checkout (docs/vllm.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gspo.policy.tiny import build_tokenizer

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = any("tests/vllm" in argument for argument in config.args)
    if not (PYTHON.exists() and asked):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="a server of its own takes minutes: make test-vllm (docs/vllm.md)")
                )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Like builtin:tiny, with heads of 32: vLLM's CPU attention knows none of 16."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
