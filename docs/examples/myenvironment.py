"""An environment of one's own: a number is to be found, and each guess is told "<" or ">"."""

from zerokl.engine.tasks.environment import EnvironmentKey, Observation
from zerokl.engine.tasks.problem import Problem


class HigherLower:
    """One game. The reward is 1 for the number, however many guesses it took."""

    def __init__(self, guesses: int):
        self.left = guesses

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        """The prompt. What a game draws at random would come from key.random()."""
        self.number = int(problem.answer)
        return problem.prompt

    def step(self, ids: list[int], text: str) -> Observation:
        """The answer to a turn."""
        self.left -= 1
        if text == str(self.number):
            return Observation(reward=1.0, done=True)
        if not text.isdecimal():
            return Observation("?", done=not self.left)
        return Observation("<" if self.number < int(text) else ">", done=not self.left)


class Game:
    """A task: numbers 0 to largest, each with `guesses` guesses."""

    chat = False  # what the environment says goes to the model as it is
    binary = True  # the reward of a trajectory is 0 or 1: the mean is an accuracy

    def __init__(self, largest: int = 14, guesses: int = 4):
        if not 1 <= largest <= 999:
            raise ValueError(f"task game: largest ({largest}) must lie in 1 to 999")
        self.largest, self.guesses = largest, guesses

    def problems(self, split: str) -> list[Problem]:
        """All problems of "train" or "held_out"."""
        return [Problem(i, f"0-{self.largest}:", str(i)) for i in range(self.largest + 1)]

    def environment(self) -> HigherLower:
        """A new environment, for one trajectory."""
        return HigherLower(self.guesses)

    def demonstration(self, problem: Problem) -> list[str]:
        """The turns that solve a problem, for `zerokl init`: halving."""
        low, high, turns = 0, self.largest, []
        while True:
            turns.append(str((low + high) // 2))
            if turns[-1] == problem.answer:
                return turns
            if int(problem.answer) < int(turns[-1]):
                high = int(turns[-1]) - 1
            else:
                low = int(turns[-1]) + 1
