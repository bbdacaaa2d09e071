"""Problems of reasoning-gym: the library's questions and scores, two sides, exact cursor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from gspo.config import Config
from gspo.errors import ConfigError, DataError, GspoError
from gspo.tasks import Task, load_task
from gspo.types import Prompt

factory = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym needs a C compiler to install")

from gspo.tasks.gym import GymSource, answer_of, gym_task, score  # noqa: E402

SUM = "reasoning-gym:chain_sum,min_terms=2,max_terms=2,min_digits=2,max_digits=2"


def load(spec: str, **values: object) -> Task:
    return load_task(Config().with_values({"task.prompts": spec} | values))


def scores(task: Task, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float | None]:
    return [found.reward for found in task.rewards.score(prompts, texts, [[0]] * len(texts))]


@pytest.mark.parametrize("name", ["chain_sum", "rearc", "gsm_symbolic", "word_ladder", "list_functions", "sudoku"])
def test_the_librarys_own_answer_is_fully_right(name: str) -> None:
    """Grids that are compared as tuples, fractions in the metadata, tasks that lay out a chunk, the chunk's border."""
    task = gym_task(f"reasoning-gym:{name}")
    prompts = [task.prompt("train", 0, number) for number in (0, 1, 499, 500)]
    assert len({prompt.content for prompt in prompts}) == 4
    for prompt in prompts:
        assert json.loads(json.dumps(prompt.columns)) == prompt.columns
    gold = [prompt.columns["answer"] for prompt in prompts]
    problem = [prompt.columns["problem"] for prompt in prompts]
    assert score([f"So\n<answer>{answer}</answer>" for answer in gold], problem) == [1.0] * 4
    assert score(gold, problem) == [1.0] * 4
    assert max(score(["", "I do not know", "<answer></answer>", "[1,"], problem)) < 0.2


def test_scores_are_the_librarys() -> None:
    """Against the library's data set, made with the task's defaults: partial marks and all."""
    task = gym_task("reasoning-gym:spell_backward")
    library = factory.create_dataset("spell_backward", seed=1, size=3)
    for number in range(20):
        prompt = task.prompt("train", 0, number)
        entry = {"question": prompt.content, "answer": prompt.columns["answer"], "metadata": prompt.columns["metadata"]}
        for said in (entry["answer"], entry["answer"][:-1], entry["answer"].upper(), "zzz"):
            assert score([said], [prompt.columns["problem"]]) == [library.score_answer(said, entry)]


def test_what_a_scorer_cannot_parse_scores_nothing() -> None:
    task = gym_task("reasoning-gym:prime_factorization")
    prompt = task.prompt("train", 0, 0)
    with pytest.raises(ValueError):
        factory.create_dataset("prime_factorization", seed=1).score_answer("seven", {"answer": "7", "metadata": {}})
    assert score(["seven"], [prompt.columns["problem"]]) == [0.0]


@pytest.mark.parametrize(
    ("said", "gold", "expected"),
    [
        ("<answer> 5 </answer>", "7", "5"),
        ("<answer>1</answer> no, <answer>2\n</answer> done", "7", "2"),
        ("Let me think.\n\n 42 \n\n", "7", "42"),
        ("42", "7", "42"),
        ("", "7", ""),
        ("1 2\n3 4\n", "9 9\n9 9", "1 2\n3 4"),
        ("1 2\n3 4", "9\n", "3 4"),
        ("yes", None, "yes"),
        ("<answer>5", "7", "<answer>5"),
    ],
)
def test_where_the_answer_is(said: str, gold: str | None, expected: str) -> None:
    assert answer_of(said, gold) == expected


def test_sides_share_no_question_and_seeds_differ() -> None:
    """chain_sum draws problem n of seed s from s + n: seeds next to each other would repeat each other's problems."""
    task = load(SUM)
    asked = [prompt.content for prompt in task.train.take(1500)]
    held = {prompt.content for prompt in task.heldout}
    assert 200 < len(held) <= 256 and not held & set(asked)
    other = load(SUM, **{"run.seed": 1})
    assert other.heldout == task.heldout
    shared = set(asked) & {prompt.content for prompt in other.train.take(1500)}
    assert len(shared) < 0.5 * len(set(asked))
    one, two = (load("reasoning-gym:gcd", **{"run.seed": seed}).train.take(300) for seed in (0, 1))
    assert len({p.content for p in one} & {p.content for p in two}) < 30


def test_a_task_with_few_problems_keeps_most_for_training() -> None:
    task = load("reasoning-gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    assert 5 < len(task.heldout) < 30
    mixed = load("reasoning-gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2")
    assert 50 < len(mixed.heldout) < 256
    asked = {prompt.content for prompt in task.train.take(2000)}
    assert len(asked) > 8 * len(task.heldout) and not asked & {p.content for p in task.heldout}


def test_held_out_problems_that_are_named_leave_training_too() -> None:
    task = load(SUM, **{"eval.prompts": SUM, "eval.num_prompts": 100})
    assert task.heldout == load(SUM, **{"eval.num_prompts": 100}).heldout
    assert not {p.content for p in task.train.take(1500)} & {p.content for p in task.heldout}
    other = load(SUM, **{"eval.prompts": "reasoning-gym:gcd", "eval.num_prompts": 5})
    gold = [prompt.columns["answer"] for prompt in other.heldout]
    assert scores(other, other.heldout, gold) == [1.0] * 5
    everything = [gym_task(SUM).prompt("train", 0, number).content for number in range(1000)]
    with pytest.raises(DataError, match="nearly all problems are held out"):
        GymSource(gym_task(SUM), 0, [str(content) for content in everything]).take(1)


def test_it_goes_on_exactly_where_it_was() -> None:
    straight = load(SUM).train.take(60)
    for cut in (1, 13, 40):
        first, second = load(SUM).train, load(SUM).train
        before = first.take(cut)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + second.take(60 - cut) == straight


def test_problems_are_the_same_in_another_process() -> None:
    code = (
        "import sys; from gspo.tasks.gym import GymSource, gym_task; s = GymSource(gym_task(sys.argv[1]), 3); "
        "print([p.content for p in s.take(20)], s.fingerprint)"
    )
    ran = subprocess.run([sys.executable, "-c", code, SUM], capture_output=True, text=True, check=True)
    here = GymSource(gym_task(SUM), 3)
    assert ran.stdout.strip() == f"{[p.content for p in here.take(20)]} {here.fingerprint}"
    prints = {GymSource(gym_task(spec), seed).fingerprint for spec in (SUM, "reasoning-gym:gcd") for seed in (0, 3)}
    assert len(prints | {GymSource(gym_task(SUM), 3, ["x"]).fingerprint}) == 5


def test_settings_reach_the_task() -> None:
    spec = 'reasoning-gym:basic_arithmetic,operators=["+","-"],allow_parentheses=false,format_style=natural,max_terms=3'
    task = gym_task(spec)
    assert task.settings == {
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "format_style": "natural",
        "max_terms": 3,
    }
    asked = " ".join(str(task.prompt("train", 0, number).content) for number in range(40))
    assert not set("*/()") & set(asked) and "Calculate" not in asked
    assert gym_task("reasoning-gym:basic_arithmetic, allow_negation = False").settings == {"allow_negation": False}


BAD = {
    "reasoning-gym:chain_sums": "has no task 'chain_sums'; there is: chain_sum",
    "reasoning-gym:": "has no task ''; there is: ab, acre",
    "reasoning-gym:chain_sum,max_term=3": "no setting 'max_term'; there is: max_terms",
    "reasoning-gym:chain_sum,seed=3": "leave out 'seed'",
    "reasoning-gym:chain_sum,size=3": "leave out 'size'",
    "reasoning-gym:chain_sum,min_terms=5,max_terms=3": "the task refuses its settings",
    "reasoning-gym:chain_sum,min_terms=few": "the task refuses its settings",
    "reasoning-gym:composite": "the task refuses its settings",
}


@pytest.mark.parametrize("spec", BAD)
def test_a_wrong_task_or_setting_is_one_sentence(spec: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(spec)
    assert BAD[spec] in str(error.value) and "\n" not in str(error.value)


def test_a_problem_that_cannot_be_made_is_one_sentence() -> None:
    with pytest.raises(GspoError, match=r"reasoning-gym:spell_backward,.*: the task cannot make problem 0: "):
        load("reasoning-gym:spell_backward,min_word_len=60,max_word_len=61")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    gym_task.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"Run: pip install 'gspo\[reasoning-gym\]'"):
        load(SUM)
