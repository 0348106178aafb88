"""Environments for runs of the random model, as a user would write them: tasks `acts:NAME`."""

import os
import signal
import time
from pathlib import Path

from zerokl.engine.tasks.environment import Observation
from zerokl.engine.tasks.problem import Problem

KILL = Path("kill")
WRONG = {2: Observation("x", reward=float("nan")), 3: Observation(b"x"), 4: Observation([999])}


def letters(text):
    return sum(c.isalpha() for c in text) / 8


class Echo:
    """Says the turn again, backwards; the reward of a turn is its letters. Done after three turns."""

    turns = 3

    def reset(self, problem, key):
        self.left, self.random = self.turns, key.random()
        return problem.prompt

    def step(self, ids, text):
        self.left -= 1
        return Observation(f"{text[::-1]}:{self.random.randint(0, 99)}=", letters(text), done=not self.left)


class Forever(Echo):
    turns = -1


class Long(Echo):
    """Its content fills the context at the second turn."""

    def step(self, ids, text):
        return Observation("x" * 50, letters(text))


class Faulty(Echo):
    """Fails, hangs, exits and answers what it must not, each for one problem; for the others it is Echo."""

    def reset(self, problem, key):
        self.problem = problem.id
        if problem.id == 1 and key.sample == 0:
            raise RuntimeError("no start")
        return super().reset(problem, key)

    def step(self, ids, text):
        if self.left == 2 and self.problem == 2:
            os._exit(1)
        if self.left == 2 and self.problem == 3:
            return Observation("\u00e9")  # the tokenizer does not know it
        if self.left == 2 and self.problem == 4:
            return Observation([1, 999])
        return super().step(ids, text)


class Wrong(Echo):
    """In the second turn of sample 0 it hangs, forks, or answers what no environment may."""

    def reset(self, problem, key):
        self.problem = problem.id if key.sample == 0 else 5
        return super().reset(problem, key)

    def step(self, ids, text):
        if self.left == 2:
            if self.problem == 0:
                time.sleep(60)
            if self.problem == 1:
                os.fork()  # two processes answer
            if self.problem in WRONG:
                return WRONG[self.problem]
        return super().step(ids, text)


class Caller(Echo):
    """In sample 0 of each problem a tool answers the second turn; all else is what a user says."""

    def reset(self, problem, key):
        self.calls = key.sample == 0
        return super().reset(problem, key)

    def step(self, ids, text):
        if self.left == 2 and self.calls:
            return Observation([{"role": "tool", "content": "7"}])
        return super().step(ids, text)


class Broken(Echo):
    def step(self, ids, text):
        raise RuntimeError("always")


class Killing(Echo):
    """Kills the run between the second turn of a trajectory and its third one, once: where a file is."""

    def step(self, ids, text):
        if KILL.exists() and self.left == 2 and self.random.random() < 0.5:
            KILL.unlink()
            # Its parent is the process that keeps it; that one's parent is the run.
            status = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(status.rsplit(") ")[1].split()[1]), signal.SIGKILL)
        return super().step(ids, text)


class Pair:
    """A game: whoever writes more letters wins. The second player sees what the first one wrote."""

    players = 2

    def reset(self, problem, key):
        self.first = None
        return problem.prompt

    def step(self, ids, text):
        if self.first is None:
            self.first = text
            return Observation(f"{text}<", player=1)
        a, b = letters(self.first), letters(text)
        return Observation(reward=[float(a > b), float(b > a)], done=True)


def task(kind, in_chat=False):
    class Task:
        chat = in_chat
        environment = kind

        def problems(self, split):
            return [Problem(i, f"{i}+{i}=", "") for i in range(6)]

    return Task


echo, forever, long, faulty, wrong, broken, killing, pair = map(
    task, (Echo, Forever, Long, Faulty, Wrong, Broken, Killing, Pair)
)
caller = task(Caller, in_chat=True)
