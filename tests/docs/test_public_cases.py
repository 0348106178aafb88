"""docs/audit/public-cases.md: its answers are those of an audit to the logs that its script writes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zerokl
from zerokl.audit.columns import audit_columns
from zerokl.cli import main

DOCS = Path(zerokl.__file__).parent / "docs"
PAGE = (DOCS / "audit" / "public-cases.md").read_text()
SHOWN = re.findall(r"^zerokl audit cases/([\w-]+)\.jsonl\n```\n+```text\n(.*?)^```", PAGE, re.M | re.S)


def joined(text: str) -> str:
    """A text on one line, as a page and a terminal break it otherwise."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the script has written its logs."""
    folder = tmp_path_factory.mktemp("public")
    script = DOCS / "examples" / "public_cases.py"
    subprocess.run([sys.executable, "-B", script, "cases"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(("case", "answer"), SHOWN, ids=[case for case, _ in SHOWN])
def test_an_answer_of_the_page_is_the_audits(folder, monkeypatch, capsys, case, answer):
    monkeypatch.chdir(folder)
    assert main(["audit", f"cases/{case}.jsonl", "--out", f"out-{case}"]) == 1
    printed, place = joined(capsys.readouterr().out), 0
    for sentence in re.split(r"(?<=[.:]) ", joined(answer)):
        place = printed.index(sentence, place) + len(sentence)  # the page leaves some out


def test_each_log_of_the_script_is_on_the_page_and_a_sound_one_has_no_fault(folder, monkeypatch):
    assert sorted(case for case, _ in SHOWN) == sorted(x.stem for x in (folder / "cases").iterdir()) != []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    from public_cases import log, with_signal

    rows = with_signal(log(), [float(i % 3 == 0) for i in range(64)])
    (folder / "sound.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = audit_columns(folder / "sound.jsonl")
    assert (report.outcome.passed, report.outcome.faults) == (True, ())


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """trained(hash_seed, *words): a run of the public script, as its log."""
    monkeypatch.chdir(tmp_path)

    def run(hash_seed: int, *words: str) -> None:
        script, environment = DOCS / "examples" / "public_script.py", {"PYTHONHASHSEED": str(hash_seed)}
        subprocess.run([sys.executable, "-B", script, *words], env=os.environ | environment, check=True)

    return run


def test_seeds_that_differ_by_process_are_told(trained, capsys):
    for hash_seed, words in (
        (1, ["run"]),
        (2, ["again"]),
        (1, ["mended", "--mended"]),
        (2, ["both", "--mended"]),
    ):
        trained(hash_seed, *words)
    assert main(["diff", "run", "again"]) == 1
    told = joined(capsys.readouterr().out)
    assert "first difference at step 0: completion token" in told
    assert "the seed of both is 0 (seed in run/config.json): the draws depend on more than the seed" in told
    assert main(["diff", "mended", "both"]) == 0
    capsys.readouterr()
    for config in (
        '{\n"seed": 1\n}',
        "{}",
    ):  # another seed explains other draws, and one that is not known may
        Path("again/config.json").write_text(config)
        assert main(["diff", "run", "again"]) == 1
        assert "depend on more" not in joined(capsys.readouterr().out)


def test_a_resume_without_moments_is_told(trained, capsys):
    for words in (
        ["straight"],
        ["resumed", "straight"],
        ["mended", "--mended"],
        ["whole", "mended", "--mended"],
    ):
        trained(0, *words)
    assert main(["diff", "straight", "resumed"]) == 1
    assert "So the optimizer's state was lost" in joined(capsys.readouterr().out)
    assert main(["diff", "mended", "whole"]) == 0
