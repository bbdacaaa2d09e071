"""``GSPOTrainer``: a run from Python objects, in a script or a notebook, in the form that TRL's users know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from gspo.config import Config, as_path
from gspo.errors import ConfigError
from gspo.evaluation.run import evaluate_system
from gspo.policy.load import Policy, as_policy
from gspo.records import RunDirectory
from gspo.rollout.system import System, load_system
from gspo.tasks import load_task
from gspo.tasks.functions import PYTHON, RewardFunction, function_name, importable_as
from gspo.training.callbacks import Callback, RunInfo
from gspo.training.checkpoint import newest_whole, write_model
from gspo.training.export import export, new_folder
from gspo.training.loop import RunResult, train
from gspo.types import Prompt

Rows = Iterable[Mapping[str, Any] | Prompt]
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class GSPOTrainer:
    """Train a model with GSPO on rows and reward functions given from Python.

    Example::

        trainer = GSPOTrainer("Qwen/Qwen3-0.6B", rows, correct, {"optimizer.learning_rate": 1e-5})
        result = trainer.train()
        trainer.save_model("my-model")

    Args:
        model: a hub id or a folder, as ``model.path``; or a loaded transformers causal LM, which is trained in place
            (it computes in ``model.dtype`` from then on).
        train_dataset: rows (dictionaries with a ``prompt`` and columns for the rewards; a ``datasets.Dataset`` is such
            rows), or text as in ``task.prompts``.
        reward_funcs: a function in TRL's form, text as in ``task.reward``, or a list of these. None: the config's, or
            those that come with the prompts.
        config: a Config, the path of a TOML file, or a dictionary of 'section.key' and values. The other arguments win.
        eval_dataset: held-out rows, or text as in ``eval.prompts``. None: some rows are held out.
        callbacks: told what happens, such as ``gspo.PlainView()``.
        tokenizer: of a loaded model. None: loaded from where the model came from.

    Everything is loaded here. Raises ConfigError, DataError or RewardError when the run could not start.
    """

    def __init__(
        self,
        model: Any,
        train_dataset: str | Path | Rows,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
        config: Config | str | Path | Mapping[str, Any] | None = None,
        eval_dataset: str | Path | Rows | None = None,
        callbacks: Sequence[Callback] = (),
        tokenizer: Any = None,
    ) -> None:
        callbacks = _checked_callbacks(callbacks)
        functions = _as_list(reward_funcs)
        policy = None if isinstance(model, (str, Path)) else _loaded(model, tokenizer)
        rows, heldout_rows = (None if isinstance(d, (str, Path)) else d for d in (train_dataset, eval_dataset))
        values: dict[str, Any] = {
            "model.path": str(model) if policy is None else policy.name,
            "task.prompts": str(train_dataset) if rows is None else f"{PYTHON}rows",
        }
        if eval_dataset is not None:
            values["eval.prompts"] = str(eval_dataset) if heldout_rows is None else f"{PYTHON}rows"
        if functions:
            values["task.reward"] = tuple(map(_written, functions))
        self.config = _as_config(config).with_values(values, where="GSPOTrainer").resolved()
        task = load_task(self.config, rows=rows, heldout_rows=heldout_rows, functions=functions)
        self.system: System = load_system(self.config, task=task, policy=policy)
        self._place, self._closed = _Place(), False
        self.callbacks = [self._place, *callbacks]

    @property
    def model(self) -> Any:
        """The transformers model that is trained."""
        return self.system.policy.model

    @property
    def directory(self) -> Path | None:
        """The run's folder, once ``train`` has begun."""
        return self._place.directory

    def __enter__(self) -> GSPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs outside this process: a vLLM server, processes of reward functions. May be called twice.

        ``with GSPOTrainer(...) as trainer:`` does it at the end of the block. ``save_model`` still works then;
        ``train`` and ``evaluate`` raise ConfigError.
        """
        self._closed = True
        self.system.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "This trainer is closed. Make a new GSPOTrainer; train(resume='FOLDER') goes on with a run."
            )

    def train(self, resume: bool | str | Path = False) -> RunResult:
        """Run to the end; what it leaves is in ``RunResult`` and the run's folder.

        ``resume``: go on from the newest checkpoint of this trainer's run (True), or of the run with this folder or
        name. Raises what ``gspo.train`` raises.
        """
        self._check_open()
        if not isinstance(resume, (bool, str, Path)):
            raise ConfigError(
                f"resume must be True, False, or the folder or name of a run, found a {type(resume).__name__}."
            )
        if self.directory is not None and resume is False:
            raise ConfigError(
                f"This trainer has trained already ({self.directory}), so it no longer has the weights it began with. "
                "Go on with trainer.train(resume=True), or make a new GSPOTrainer."
            )
        found = (str(self.directory or "auto") if resume else None) if isinstance(resume, bool) else str(resume)
        return train(self.config, resume=found, callbacks=self.callbacks, system=self.system)

    def evaluate(self) -> dict[str, Any]:
        """The present weights on the held-out prompts: one record as in eval.jsonl. Writes nothing."""
        self._check_open()

        def progress(stage: str, done: int, total: int) -> None:
            for callback in self.callbacks:
                callback.on_progress(stage, done, total)

        record, answers = evaluate_system(self.system, self.config, self._place.iteration, progress)
        for callback in self.callbacks:
            callback.on_eval(record, answers)
        return record

    def save_model(self, path: str | Path) -> None:
        """The newest checkpoint's weights (before training: the model's) as a plain Hugging Face folder, in float32.

        Raises ConfigError when the folder exists, CheckpointError when the disk does not take it.
        """
        out = as_path(path)
        if self.directory is not None and newest_whole(RunDirectory(self.directory).checkpoints)[0] is not None:
            export(self.directory, out)
            return
        new_folder(out, lambda folder: write_model(self.system.policy, None, folder))


class _Place(Callback):
    """Where the run is written, and how far it is."""

    directory: Path | None = None
    iteration = 0

    def on_start(self, run: RunInfo) -> None:
        self.directory, self.iteration = run.directory, run.start_iteration

    def on_iteration(self, metrics: Mapping[str, Any], groups: Sequence[Any]) -> None:
        self.iteration = metrics["iteration"]


def _as_config(config: Config | str | Path | Mapping[str, Any] | None) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, (str, Path)):
        loaded = Config.load(config)
        return loaded if loaded.run.name else loaded.with_values({"run.name": Path(config).stem})
    if config is None or isinstance(config, Mapping):
        return Config().with_values(config or {}, where="GSPOTrainer's config")
    raise ConfigError(
        "GSPOTrainer's config must be a Config, the path of a TOML file or a dictionary such as "
        f"{{'rollout.max_tokens': 64}}, found a {type(config).__name__}. docs/coming_from_trl.md says what became of "
        "GRPOConfig's keys."
    )


def _as_list(functions: Any) -> list[RewardFunction | str]:
    given = [] if functions is None else [functions] if isinstance(functions, str) or callable(functions) else functions
    if not isinstance(given, (list, tuple)):
        raise ConfigError(
            f"reward_funcs must be a function, a name or a list of these, found a {type(given).__name__}."
        )
    for function in given:
        if not isinstance(function, str) and not callable(function):
            raise ConfigError(
                f"reward_funcs must be functions or names such as 'rewards.py:correct', found a "
                f"{type(function).__name__}."
            )
        if isinstance(function, transformers.PreTrainedModel):
            raise ConfigError(
                "reward_funcs holds a model. Write a function that calls it and returns a number for each completion."
            )
    return list(given)


def _written(function: RewardFunction | str) -> str:
    """How a reward function stands in config.toml."""
    if isinstance(function, str):
        return function
    return importable_as(function) or f"{PYTHON}{function_name(function)}"


def _loaded(model: Any, tokenizer: Any) -> Policy:
    if not isinstance(model, transformers.PreTrainedModel) or hasattr(model, "peft_config"):
        raise ConfigError(
            f"GSPOTrainer's model must be a hub id, a folder or a transformers causal language model, found a "
            f"{type(model).__name__}. Adapters are not supported: merge them into the model first."
        )
    if getattr(model, "is_quantized", False):
        raise ConfigError("GSPOTrainer's model is quantized, so its weights cannot be trained. Load it without.")
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"GSPOTrainer's model, a {type(model).__name__}, has no language-model head. Load it with "
            "AutoModelForCausalLM."
        )
    if tokenizer is not None and not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer must be a transformers tokenizer, found a {type(tokenizer).__name__}.")
    origin = model.config._name_or_path
    if tokenizer is None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(origin)
        except Exception as error:  # whatever is wrong with the place it came from
            raise ConfigError(
                f"The model's tokenizer cannot be loaded from {origin!r}, where the model came from. Give it: "
                "GSPOTrainer(model, ..., tokenizer=tokenizer)."
            ) from error
    return as_policy(model, tokenizer, origin or f"{PYTHON}{type(model).__name__}")


def _checked_callbacks(callbacks: Any) -> Sequence[Callback]:
    callbacks = () if callbacks is None else callbacks
    if not isinstance(callbacks, (list, tuple)):
        raise ConfigError(f"callbacks must be a list of gspo.Callback, found a {type(callbacks).__name__}.")
    for callback in callbacks:
        if isinstance(callback, type):
            raise ConfigError(
                f"callbacks holds the class {callback.__name__}; give an instance: {callback.__name__}()."
            )
        missing = [event for event in EVENTS if not callable(getattr(callback, event, None))]
        if missing:
            raise ConfigError(
                f"The callback {type(callback).__name__} has no {missing[0]}; subclass gspo.Callback and override what "
                "you need."
            )
    return callbacks
