"""Problems with a Python tool: the model writes programs, reads what they print, and answers.

A turn with a fence of the word python, around `print(12 * 34)` for instance, is a program, and its answer is
what the program prints.

A turn without one is the answer to the problem. Several fences of a turn are one program, in their order. A
fence that is not closed ends with the turn. With the option `calls` a program is the argument `code` of a
call of the tool `python` instead, and each call is a program of its own (tool_calls.py).

run_python.py says what a program may do, and what is fixed.
"""

import re
from functools import cache

from ...files.reading import one_line, shown
from .answers import NAMED_REWARDS
from .base import Problem
from .confinement import missing
from .environment import LONGEST_CONTENT, Content, EnvironmentKey, Observation
from .jsonl import Jsonl
from .run_python import ToolLimits, run_python
from .tool_calls import ToolCalls, answers

_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MIB = 1 << 20
_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program. Returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}


class PythonEnvironment:
    """One trajectory. tools, tool_calls: see Environment."""

    def __init__(self, task: "Python"):
        self._task, self.tool_calls = task, task.calls
        self.tools = [_TOOL] if task.calls and task.chat else None

    def reset(self, problem: Problem, key: EnvironmentKey) -> Content:
        """The problem, with its system prompt."""
        self._problem = problem
        if not problem.system:
            return problem.prompt
        turns = ("system", problem.system), ("user", problem.prompt)
        return [{"role": role, "content": content} for role, content in turns]

    def step(self, ids: list[int], text: str, calls: ToolCalls | None = None) -> Observation:
        """What the turn's program prints. A turn without a program is the answer."""
        if calls is not None:
            return self._called(text, calls)
        if (program := program_of(text)) is None:
            return self._answer(text)
        output = run_python(program, self._task.limits)
        line_end = "" if not output or output.endswith("\n") else "\n"
        content = f"```output\n{output}{line_end}```"
        return Observation(content if self._task.chat else f"\n{content}\n")

    def _answer(self, text: str) -> Observation:
        return Observation(reward=self._task.reward(self._problem, text), done=True)

    def _called(self, text: str, calls: ToolCalls) -> Observation:
        if not calls.calls and not calls.error:
            return self._answer(text)
        messages = answers(calls, {"python": self._run})
        return Observation(messages if self._task.chat else "\n".join(m["content"] for m in messages))

    def _run(self, code: str) -> str:
        if not isinstance(code, str):
            raise ValueError(f"needs its code as a string ({shown(code)})")
        return run_python(code, self._task.limits)


class Python(Jsonl):
    """The problems of a file (see Jsonl), with a Python tool.

    reward: how an answer is compared: exact, numeric or math. timeout_s: seconds of processor time of a
    program, and five times as many by the clock. memory_mib: MiB of memory that it may ask for.
    output_chars: characters that it may print. calls: the form in which the model calls the tool (see
    Environment.tool_calls); empty is fences.

    Raises ValueError as Jsonl does, and for numbers out of range.
    """

    def __init__(
        self,
        file: str = "",
        prompt: str = "prompt",
        answer: str = "answer",
        answer_after: str = "",
        template: str = "",
        system: str = "",
        chat: bool = True,
        held_out_file: str = "",
        held_out: int | float = 0,
        seed: int = 0,
        reward: str = "math",
        timeout_s: int = 3,
        memory_mib: int = 512,
        output_chars: int = 2000,
        calls: str = "",
    ):
        if reward not in NAMED_REWARDS:
            raise ValueError(
                f"task python: reward ({shown(reward)}) is not known; choose {', '.join(NAMED_REWARDS)}"
            )
        for name, value, least in (
            ("timeout_s", timeout_s, 1),
            ("memory_mib", memory_mib, 64),
            ("output_chars", output_chars, 1),
        ):
            if value < least:
                raise ValueError(f"task python: {name} ({value}) must be at least {least}")
        if output_chars > LONGEST_CONTENT // 2:
            raise ValueError(
                f"task python: output_chars ({output_chars}) must be at most {LONGEST_CONTENT // 2}, half of "
                "what an environment may answer"
            )
        super().__init__(
            file, prompt, answer, answer_after, template, system, chat, held_out_file, held_out, seed
        )
        self._named = NAMED_REWARDS[reward]
        self.calls = calls
        self.limits = ToolLimits(timeout_s, memory_mib * _MIB, output_chars)

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for a right answer, else 0.0."""
        return self._named(problem, completion)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for an answer that the reward cannot read."""
        self._named.check(problem)

    def environment(self) -> PythonEnvironment:
        _say_what_is_open()
        return PythonEnvironment(self)


@cache
def _say_what_is_open() -> None:
    """Print what the kernel cannot refuse to a program, in one line of each process."""
    if places := missing():
        print(one_line(f"python tool: this kernel does not close {', '.join(places)}"))


def program_of(text: str) -> str | None:
    """The program of a turn; None where it has none."""
    programs = _FENCE.findall(text)
    return "\n".join(programs) if programs else None
