"""All checks in order, each on what the ones before have loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from gspo.config import Config
from gspo.doctor import machine, sampled
from gspo.doctor.finding import Finding, fail, ok, warn
from gspo.errors import GspoError
from gspo.rollout.system import System, load_system
from gspo.sync.publish import Publisher
from gspo.training.trainer import Trainer
from gspo.types import Prompt

Progress = Callable[[str, int, int], None]


def examine(config: Config, progress: Progress = lambda *_: None) -> Iterator[Finding]:
    """Findings one by one, as they are made; at most eight prompts are sampled. Changes no file and no weight."""
    config = config.resolved()
    yield machine.check_versions()
    yield machine.check_clip_band(config)
    problems: list[Finding] = []
    with _as_finding(problems, "loading"):
        system = load_system(config)
    if problems:
        yield from problems
        return
    with closing(system):
        yield from _with_system(system, config, progress)


def _with_system(system: System, config: Config, progress: Progress) -> Iterator[Finding]:
    yield machine.check_precision(system.policy)
    yield check_attention(system, config)
    prompts = peek(system, sampled.PROMPTS)
    yield sampled.check_chat(system.chat, prompts)
    yield sampled.check_rewards(system, prompts)
    yield sampled.check_heldout(config, len(system.task.heldout))
    trainer = Trainer(system.policy, config)
    yield machine.check_disk(config, trainer)
    memory = machine.check_memory(config, trainer, *machine.memory_now_and_available())
    yield memory
    if memory.level != "fail":
        yield from _with_answers(system, trainer, config, progress)


def _with_answers(system: System, trainer: Trainer, config: Config, progress: Progress) -> Iterator[Finding]:
    problems: list[Finding] = []
    with _as_finding(problems, "weights reach the engine"):
        publisher = Publisher(system.policy, system.engine)
    if problems:
        yield from problems
        return
    yield sampled.check_weights_arrive(system, publisher)
    with _as_finding(problems, "sampling"):
        collected = sampled.sample(system, config, progress)
    if problems:
        yield from problems
        return
    yield sampled.check_signal(collected)
    yield sampled.check_length(collected, config)
    iteration = sampled.train_once(collected, trainer, config)
    yield sampled.check_noise(iteration, config)
    yield sampled.check_time(collected, iteration, config, len(system.task.heldout))


def check_attention(system: System, config: Config) -> Finding:
    """Packed against plain, as measured while loading."""
    line = next(fact for fact in system.facts if fact.startswith("attention:")).removeprefix("attention: ")
    if system.policy.attention == "plain" and config.model.attention != "plain":
        return warn("attention", line, "It is right, and several times slower.")
    return ok("attention", line)


def peek(system: System, count: int) -> list[Prompt]:
    """The next prompts, without taking them."""
    source = system.task.train
    place = source.state_dict()
    prompts = source.take(count)
    source.load_state_dict(place)
    return prompts


@contextmanager
def _as_finding(problems: list[Finding], name: str) -> Iterator[None]:
    """A sentence for the user becomes a finding; anything else is a bug and goes on."""
    try:
        yield
    except GspoError as error:
        problems.append(fail(name, str(error), ""))
