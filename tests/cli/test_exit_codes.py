"""Every exit code says one thing, the same that docs/commands.md says."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zerokl
from zerokl import cli
from zerokl.cli import main
from zerokl.cli.exit_codes import ExitCode

ROOT = Path(zerokl.__file__).parent
REMOVES = """
from pathlib import Path
calls = []

def removes(problem, completion):
    calls.append(1)
    if len(calls) == {calls}:
        Path("run/{name}").unlink()
    return len(calls) % 2
"""


def test_the_documentation_has_the_table():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "commands.md").read_text(), re.M)
    body = ast.parse((ROOT / "cli" / "exit_codes.py").read_text()).body[-1].body
    texts = [x.value.value for x in body if isinstance(x, ast.Expr)][1:]
    assert [(int(code), text.replace("\\|", "|")) for code, text in rows] == [
        (int(code), text) for code, text in zip(ExitCode, texts, strict=True)
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(
            pytest.param(x, marks=pytest.mark.full)
            for x in ("train --help", "verify --dtype fp32 --longest 20")
        ),
    ],
)
def test_a_reader_that_ends_first_is_no_mismatch(words):
    """The reader is closed before anything is printed, so the first line meets a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zerokl", *words.split()]
    process = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (ExitCode.OUTPUT_CLOSED, b"")


@pytest.mark.full
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("calls", [5, 8], ids=["in the second step", "in the last call"])
def test_a_file_that_is_removed_while_a_run_writes_it_ends_the_run(folder, training, capsys, name, calls):
    """A step has 4 rewards. The last one comes before the last lines are written."""
    (folder / "removing.py").write_text(REMOVES.format(calls=calls, name=name))
    sys.modules.pop("removing", None)
    assert (
        main(training(task__reward="removing:removes", task__reward_processes=1, workers=1))
        == ExitCode.REFUSED
    )
    error = capsys.readouterr().err
    assert f"run/{name}: was removed or replaced while it was being written" in error
    assert len(error.splitlines()) == 1
    assert not (folder / "run" / "summary.json").exists()


def test_a_complete_run_whose_report_cannot_be_written_is_done(folder, training, capsys, monkeypatch):
    from zerokl.engine.runs.report import page

    def full(runs, out=None):
        raise OSError(28, "No space left on device", "run/report.html")

    monkeypatch.setattr(page, "write_report", full)
    assert main(training()) == ExitCode.DONE
    error = capsys.readouterr().err
    assert error.startswith("zerokl: no report was written: run/report.html: No space left on device")
    assert (folder / "run" / "summary.json").exists()


def test_an_error_that_nobody_foresaw_has_a_code_of_its_own(monkeypatch, capsys):
    def broken(words, **how):
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", broken)
    assert main(["train"]) == ExitCode.INTERNAL
    assert capsys.readouterr().err.startswith("zerokl: internal error: KeyError")
