"""Programs of the model's: what they print, what they may not do, and that nothing is lost.

The programs here do no harm where a limit is missing: they then print something else.
"""

import json
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from zerokl.cli import main
from zerokl.engine.tasks import confinement, python_tool
from zerokl.engine.tasks.environment import EnvironmentKey, Turn
from zerokl.engine.tasks.environments import Answer, EnvironmentSettings, Game, open_environments
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.python_tool import program_of
from zerokl.engine.tasks.run_python import ToolLimits, run_python
from zerokl.engine.tasks.tool_calls import parse_calls

from tests.engine.tasks.test_confinement import LINUX, NAMES
from tests.engine.tasks.test_environments import answers_of
from tests.random_model import ONE_LAYER, random_model

OPEN = [place for place in confinement.missing() if place != NAMES] if LINUX else ["anything"]
pytestmark = pytest.mark.skipif(bool(OPEN), reason=f"this kernel does not close {', '.join(OPEN)}")
LIMITS = ToolLimits(timeout_s=1, memory_bytes=1 << 28, output_chars=600)
CLOSES = "import os\nfor i in range(64):\n    try: os.close(i)\n    except OSError: pass\n"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Directories of programs are made here; no test leaves one."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("print(12 * 34)", "408\n"),
        ("import fractions, json, math\nprint(math.comb(9, 3), fractions.Fraction(1, 3))", "84 1/3\n"),
        ("open('a', 'w').write('x' * 9)\nprint(len(open('a').read()))", "9\n"),
        ("import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()\nt.join()", "7\n"),
        (
            "from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "print(sum(Pool(2).map(lambda x: x * x, range(100))))",
            "328350\n",
        ),
        (
            "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x\n"
            "async def main(): return await asyncio.gather(f(1), f(2))\nprint(asyncio.run(main()))",
            "[1, 2]\n",
        ),
        ("import sqlite3\nprint(*sqlite3.connect(':memory:').execute('select 6 * 7'))", "(42,)\n"),
        (
            "import decimal, datetime, ssl, zoneinfo\nprint(zoneinfo.ZoneInfo('Europe/Berlin'))",
            "Europe/Berlin\n",
        ),
        ("import shutil\nopen('a', 'w').write('x')\nprint(open(shutil.copyfile('a', 'b')).read())", "x\n"),
        ("import signal as s\ns.signal(14, lambda *_: print(5))\ns.setitimer(0, 0.01)\ns.pause()", "5\n"),
        ("print(len(bytearray(100 << 20)))", "104857600\n"),
        ("print(len({'a', 'b'}), [*{'ab', 'cd', 'ef', 'gh'}])", None),
        ("import os\nprint(os.listdir())", "[]\n"),
        ("import sys\nprint('seen')\nsys.exit(3)", "seen\n"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("has_root", [True, False], ids=["namespaces", "no namespaces"])
def test_a_program_prints_the_same_again(monkeypatch, has_root, program, printed):
    if not has_root:
        monkeypatch.setattr(confinement, "is_allowed", lambda places: False)
    first = run_python(program, LIMITS)
    assert run_python(program, LIMITS) == first
    assert printed in (first, None)


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero\n$"),
        ("def", r"SyntaxError: invalid syntax\n$"),
        ("\0", r"SyntaxError: source code cannot contain null bytes\n$"),
        ("print('\ud800')", "SyntaxError"),
        ("input()", r"EOFError"),
        ("print('before', flush=True)\nwhile True: pass", r"^before\n\[more than 1 s\]$"),
        pytest.param(
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            r"^\[killed by signal 9\]$",
            marks=pytest.mark.full,
        ),
        ("import os\nfor _ in range(5): os.fork()", r"PermissionError: \[Errno 1\]"),
        ("import subprocess\nsubprocess.run(['ls'])", r"PermissionError|more than 600"),
        ("import ctypes\nprint(ctypes.CDLL(None).fork())", r"^-1\n$"),
        ("bytearray(10 << 30)", r"MemoryError\n$"),
        ("import socket\nsocket.socket()", r"PermissionError: \[Errno 1\]"),
        ("import ctypes\nprint(ctypes.CDLL(None).syscall(425, 8, b' ' * 120))", r"^-1\n$"),
        ("while True: print('y' * 99)", r"^(y+\n)+\n?\[more than 600 characters\]$"),
        ("import os\nos.write(2, b'\\xff' * 3)", "^\ufffd{3}$"),
        (CLOSES, "^$"),
        (CLOSES + "while True: pass", r"^\[more than 1 s\]$"),
        ("import os\nos.kill(os.getppid(), 15)", r"PermissionError: \[Errno 1\]"),
        ("import os\nos.kill(-1, 0)", r"PermissionError: \[Errno 1\]"),
        ("import os\nos.kill(os.getpid(), 40)", r"^\[killed by signal 40\]$"),
        ("import os\nos.abort()", r"^\[killed by signal 6\]$"),
        ("import ctypes\nctypes.string_at(0)", r"^\[killed by signal 11\]$"),
        ("f = open('a', 'wb')\nfor i in range(99): f.write(b' ' * (1 << 20))", r"OSError: \[Errno 27\]"),
        ("import os\nos.listdir(os.path.dirname(os.getcwd()))", r"PermissionError: \[Errno 13\]"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "not allowed to raise"),
        ("import os\nfor i in range(1100):\n    os.mkdir('d')\n    os.chdir('d')", "^$"),
        ("import zerokl", r"ModuleNotFoundError"),
        pytest.param("import time\ntime.sleep(60)", r"^\[more than 1 s\]$", marks=pytest.mark.full),
    ],
)
def test_whatever_a_program_does_is_one_observation(program, printed):
    assert re.search(printed, run_python(program, LIMITS))


def test_a_program_does_not_outlive_the_process_that_runs_it():
    code = "from zerokl.engine.tasks.run_python import ToolLimits, run_python\n"
    code += "run_python('while True: pass', ToolLimits(60, 1 << 28, 9))"
    environment = os.environ | {"TMPDIR": tempfile.tempdir}
    owner = subprocess.Popen([sys.executable, "-c", code], env=environment)
    children, deadline = Path(f"/proc/{owner.pid}/task/{owner.pid}/children"), time.monotonic() + 30
    while not (programs := [int(pid) for pid in children.read_text().split() if _is_program(pid)]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    shutil.rmtree(next(Path(tempfile.tempdir).iterdir()))
    while any(_is_program(pid) for pid in programs):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_program(pid: int | str) -> bool:
    """Whether a process is a program that runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0-X\0utf8\0-\0")
    except OSError:
        return False


@pytest.mark.parametrize(
    "does",
    ["open(f)", "open(f, 'a')", "open(f + '2', 'w')", "os.remove(f)", "os.chmod(f, 0)", "os.mkdir(f + 'd')"],
)
def test_files_outside_are_neither_read_nor_changed(tmp_path, does):
    file = tmp_path / "file"
    file.write_text("42")
    # No such file where it has no name; else permission is denied; nothing is made beside the directory.
    printed = run_python(f"import os\nf = {str(file)!r}\n{does}", LIMITS)
    assert re.search(r"Error: \[Errno (1|2|13|30)\]", printed)
    assert (file.read_text(), file.stat().st_mode & 0o777 != 0) == ("42", True)


def test_a_program_knows_nothing_of_the_run(monkeypatch):
    """Neither the variables of this process, nor its descriptors; and the sets of both have one order."""
    monkeypatch.setenv("ANSWER", "42")
    names = "['LANG', 'OMP_NUM_THREADS', 'PYTHONHASHSEED', 'TZ']"
    assert run_python("import os\nprint(sorted(os.environ))", LIMITS) == f"{names}\n"
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        program = f"import os\nprint(os.fstat({file.fileno()}))"
        assert "Bad file descriptor" in run_python(program, LIMITS)


def test_what_the_kernel_cannot_refuse_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    calls = ["other processes and programs", "the network", "shared memory"]
    assert confinement.missing() == calls
    monkeypatch.setattr(confinement, "is_allowed", lambda places: False)
    assert confinement.missing() == [*calls, "names and sizes of other files"]
    monkeypatch.setattr(confinement, "_landlock_version", lambda libc: -1)
    python_tool._say_what_is_open.cache_clear()  # an earlier test of this process may have heard the line
    for _ in range(2):
        task(tmp_path).environment()
    places = ", ".join([*calls, "files outside its directory", "names and sizes of other files"])
    line = f"python tool: this kernel does not close {places}"
    assert capsys.readouterr().out == f"{line}\n"
    assert run_python("print(1)", LIMITS) == "1\n", "and programs run all the same"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("I compute.\n```python\nprint(1)\n```\nNow", "print(1)\n"),
        ("```py\na = 1\n```\nand\n```python\nprint(a)\n```", "a = 1\n\nprint(a)\n"),
        ("```python\nprint(1)", "print(1)"),
        ("The answer is 4.", None),
        ("```\nprint(1)\n```", None),
        ("```pythonic\nprint(1)\n```", None),
    ],
)
def test_a_fence_is_a_program_and_a_turn_without_one_an_answer(text, program):
    assert program_of(text) == program


def task(folder: Path, **options):
    (folder / "problems.jsonl").write_text(json.dumps({"prompt": "What is 12 * 34?", "answer": "408"}))
    return load_task("python", {"file": "problems.jsonl", "timeout_s": 1} | options, str(folder))


def test_a_problem_is_computed_and_answered(tmp_path):
    key = EnvironmentKey(0, 0, 0, 0, 0)
    made = task(tmp_path, system="Use Python.")
    environment, (problem,) = made.environment(), made.problems("train")
    contents = environment.reset(problem, key)
    assert [message["content"] for message in contents] == ["Use Python.", "What is 12 * 34?"]
    answer = environment.step([], "```python\nprint(12 * 34)\n```")
    assert (answer.content, answer.reward, answer.done) == ("```output\n408\n```", 0.0, False)
    for text, reward in (("It is $408$.", 1.0), ("It is $409$.", 0.0)):
        last = environment.step([], text)
        assert (last.reward, last.done) == (reward, True)
    plain = task(tmp_path, chat=False, reward="exact").environment()
    assert plain.reset(problem, key) is not None
    assert plain.step([], "```python\n```").content == "\n```output\n```\n"
    assert plain.step([], "408").reward == 1.0


def test_a_program_may_be_called_as_a_tool(tmp_path):
    environment = task(tmp_path, calls="xml").environment()
    assert environment.tools[0]["function"]["name"] == "python"
    environment.reset(task(tmp_path).problems("train")[0], EnvironmentKey(0, 0, 0, 0, 0))

    def says(text: str):
        return environment.step([], text, parse_calls(text, environment.tool_calls))

    call = '<tool_call>{"name": "python", "arguments": {"code": %s}}</tool_call>'
    called = says(call % '"print(12 * 34)"' + call % "3")
    assert [m["role"] for m in called.content] == ["tool", "tool"]
    assert [m["content"] for m in called.content] == ["408\n", "error: python needs its code as a string (3)"]
    assert says("<tool_call>").content[0]["content"].startswith("error: your turn has a call that is no JSON")
    assert (says("It is 408.").reward, says("It is 408.").done) == (1.0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "best"}, r"reward \('best'\) is not known; choose exact, numeric, math"),
        ({"timeout_s": 0}, r"timeout_s \(0\) must be at least 1"),
        ({"memory_mib": 8}, r"memory_mib \(8\) must be at least 64"),
        ({"output_chars": 0}, r"output_chars \(0\) must be at least 1"),
        ({"output_chars": 200_000}, r"output_chars \(200000\) must be at most 131072"),
        ({"speed": 1}, r"option speed is not known"),
        ({"file": "none.jsonl"}, r"none.jsonl cannot be read"),
    ],
)
def test_options_that_make_no_task_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        task(tmp_path, **options)


def test_programs_of_neighbours_end_neither_each_other_nor_the_process(tmp_path):
    """One process plays three trajectories; the second one does its worst."""
    task(tmp_path)
    settings = EnvironmentSettings(
        "python", {"file": "problems.jsonl", "timeout_s": 1}, str(tmp_path), 1, 20.0, 0
    )
    worst = "import os\nfor s in (2, 9, 15):\n    try: os.kill(os.getppid(), s)\n    except OSError: pass"
    programs = ["print(1)", f"{worst}\nprint(2)", "print(3)"]
    with open_environments(settings) as environments:
        (problem,) = task(tmp_path).problems("train")
        games = [Game(problem, EnvironmentKey(0, 0, 0, 0, i)) for i in range(3)]
        for k in range(2):
            answers = answers_of(environments, games)
            assert {type(answer) for answer in answers} == {Answer}
            for game, answer, program in zip(games, answers, programs, strict=True):
                game.answered(answer)
                game.turns.append(Turn([k], f"```python\n{program}\n```"))
        assert [answer.content.split()[1] for answer in answers] == ["1", "2", "3"]


@pytest.mark.full
def test_a_run_with_the_tool_is_exact_and_can_be_read_again(tmp_path, monkeypatch):
    """Some tokens of this model are whole programs, and some are right answers, so that it writes both."""
    programs = [f"```python\nprint({i} * 7)\n```" for i in range(40)]
    answers = [f"0{' ' * k}" for k in range(1, 40)]
    characters = [*string.printable, *programs, *answers]
    model = random_model(tmp_path / "model", ONE_LAYER, characters=characters)
    stops = [0, 1, 2, *(3 + i for i, c in enumerate(string.printable) if not c.isdigit())]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"{i} is", "answer": "0"} for i in range(4)]
    Path("problems.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = "--task.name python --task.options.file problems.jsonl --task.options.reward exact --steps 2"
    more = "--prompts 4 --num_generations 8 --evaluation.every 0 --workers 1 --environment.processes 2"
    limits = "--environment.max_turns 3 --sampling.max_tokens 3"
    words = f"train --model {model} --run_dir run {words} {more} {limits}".split()
    assert main(words) == 0
    assert json.loads(Path("run/summary.json").read_text())["mismatch_max_abs"] == 0.0
    lines = [json.loads(line) for line in Path("run/rollouts.jsonl").read_text().splitlines()]
    assert {line["reward"] for line in lines} == {0.0, 1.0}
    seen = 0
    for line in lines:
        products = [7 * int(number) for number in re.findall(r"print\((\d+) \* 7\)", line["text"])]
        printed = "".join(re.findall(r"```output\n(.*?)```", line["text"], re.DOTALL)).split()
        assert [*map(int, printed)] == products[: len(printed)], "the last turn may have no answer"
        seen += len(printed)
    assert seen > 10
    assert main(["verify", "run", "run"]) == 0
