"""Ready-made rewards about length."""

from __future__ import annotations

import pytest

from gspo.config import Config
from gspo.errors import ConfigError
from gspo.tasks import RewardSuite, load_task
from gspo.tasks.functions import READY, load_reward
from gspo.tasks.rewards import Limits
from gspo.tasks.shaping import soft_overlong
from gspo.types import Prompt


def test_dapos_punishment_at_dapos_lengths() -> None:
    """DAPO, equation 13 with L_max = 20480 and L_cache = 4096, by its three cases."""

    def paper(length: int) -> float:
        if length <= 20480 - 4096:
            return 0.0
        if length <= 20480:
            return ((20480 - 4096) - length) / 4096
        return -1.0

    lengths = [0, 1, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 99999]
    found = soft_overlong(lengths, 20480, 4096)
    assert found == [paper(length) for length in lengths] and found[5] == -0.5
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=r"buffer must be"):
            soft_overlong([1], 10, buffer)


def test_as_terms_of_a_run() -> None:
    functions = [lambda completions: [1.0] * len(completions), "overlong", "length"]
    suite = RewardSuite(functions, [1.0, 0.5, 0.1], Limits(settings={"max_tokens": 10}))
    found = suite.score([Prompt("1", "q")] * 3, ["", "", ""], [[1] * 8, [1] * 9, [1] * 10])
    assert [list(one.terms.values()) for one in found] == [[1.0, 0.0, -0.8], [1.0, -0.5, -0.9], [1.0, -1.0, -1.0]]
    assert [one.reward for one in found] == pytest.approx([0.92, 0.66, 0.4])
    assert suite.names[1:] == ["overlong", "length"]


def test_by_name_from_a_config() -> None:
    config = Config().with_values({"task.reward": ("overlong",), "rollout.max_tokens": 10})
    task = load_task(config)
    (score,) = task.rewards.score([Prompt("1", "q")], [""], [[1] * 9])
    assert score.reward == -0.5
    task.rewards.close()
    assert {load_reward(name).__name__ for name in READY} == set(READY)
    with pytest.raises(ConfigError, match=r"'overlon' must be .* Did you mean 'overlong'\?"):
        load_reward("overlon")
