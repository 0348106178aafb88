"""A text environment of Gymnasium's, which draws from its own generator and from the global ones."""

import random

import gymnasium
import numpy as np


class Echo(gymnasium.Env):
    """Says back what it heard, with random numbers. A step is worth its length, and the third is the last."""

    observation_space = action_space = gymnasium.spaces.Text(10_000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return f"begin {self.np_random.integers(1000)}\n", {}

    def step(self, action):
        self.steps += 1
        text = f"{action} {self.np_random.integers(1000)} {random.random()} {np.random.rand()}"
        return text, np.float64(len(action)), False, self.steps == 3, {}


gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
