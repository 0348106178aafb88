"""The held-out reward among the metrics of a run: its names, and its curve."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# The mean reward of the weights after a step; of the weights that the run began with, in the line of step 0.
MEAN_REWARD, BASE_REWARD = "eval/reward", "eval/base_reward"
# The same number as MEAN_REWARD, where every reward is 0 or 1 by its own word.
ACCURACY = "eval/accuracy"
# On training problems, at the training temperature.
TRAINING_REWARD = "eval/training_reward"
# What the policy of a sampler earns that differs from the trainer.
SAMPLER_REWARD, SAMPLER_TRAINING_REWARD = "eval/sampler_reward", "eval/sampler_training_reward"


def held_out_name(binary: bool) -> str:
    """What the mean of held-out rewards is called. binary: whether every reward is 0 or 1 by its own word."""
    return "held-out accuracy" if binary else "held-out mean reward"


def held_out_curve(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(steps done, mean held-out reward) of every evaluation; 0 steps are the model that the run began with.

    lines: the metrics of the steps, in their order. A value that is None or not finite is left out.
    """
    points = []
    for line in lines:
        before, after = line.get(BASE_REWARD), line.get(MEAN_REWARD)
        points += [(line["step"], before), (line["step"] + 1, after)]
    return [(done, x) for done, x in points if x is not None and math.isfinite(x)]
