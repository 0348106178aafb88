"""The commands on the pages of docs/ parse, and the examples beside those of extend.md do what they say."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import matplotlib.pyplot
import pytest
import torch
import zerokl
from zerokl import cli
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.ablations.ablate import read_grid
from zerokl.engine.runs.ablations.hypotheses import judged, read_hypotheses
from zerokl.engine.tasks.answers import NAMED_REWARDS
from zerokl.engine.tasks.jsonl import Jsonl

from tests.made_run import made_run
from tests.random_model import ONE_LAYER, random_model

DOCS = Path(zerokl.__file__).parent / "docs"


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks that run zerokl, continued lines joined."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in lines if re.search(r"(^|[/ ])zerokl ", line.split("#")[0])]


COMMANDS = [
    (page.relative_to(DOCS).as_posix(), line)
    for page in sorted(DOCS.rglob("*.md"))
    for line in commands(page)
]


@pytest.fixture
def parsed(monkeypatch, capsys):
    """parsed(line): the exit code and the message of a command line that is parsed and not run."""
    app = cli.app
    monkeypatch.setattr(cli, "app", lambda words, **how: app.parse_args(words, **how) and 0)

    def parse(line: str) -> tuple[int, str]:
        words = shlex.split(line, comments=True)
        start = next(i for i, word in enumerate(words) if word.rpartition("/")[2] == "zerokl")
        return cli.main(words[start + 1 :]), capsys.readouterr().err

    return parse


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=str)
def test_every_command_of_the_pages_parses(parsed, page, line):
    assert parsed(line) == (0, "")


def test_options_have_one_spelling_that_of_the_keys():
    root = DOCS.parent
    pages = [root / "README.md", *sorted(DOCS.rglob("*.md")), root / "Makefile"]
    # These two say that hyphens will do as well.
    pages = [page for page in pages if page.name not in ("commands.md", "configuration.md")]
    options = set(re.findall(r"--[a-z]+(?:_[a-z0-9]+)+", " ".join(page.read_text() for page in pages)))
    assert {"--run_dir", "--max_tokens"} <= options
    for page in pages:
        hyphened = set(re.findall(r"--[a-z]+(?:-[a-z0-9]+)+", page.read_text()))
        assert not hyphened & {option[:2] + option[2:].replace("_", "-") for option in options}, page


@pytest.mark.parametrize("page", ["extend.md", "audit/index.md", "precision.md", "reproduce.md"])
def test_control_a_misspelt_option_is_found(parsed, page):
    line = next(line for name, line in COMMANDS if name == page and " --" in line)
    code, message = parsed(line.replace(" --", " --z", 1))
    assert code == 2, line
    assert "known" in message


def test_every_file_that_a_page_shows_is_an_example():
    shown = {
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"(?:generated: file docs/|\]\()(examples/[^\s)]+)", page.read_text())
    }
    files = (file for file in (DOCS / "examples").rglob("*.*") if file.is_file())
    made = {"__pycache__", ".ipynb_checkpoints"}
    assert {str(file.relative_to(DOCS)) for file in files if made.isdisjoint(file.parts)} == shown


def test_the_grid_has_a_run_for_each_dtype_sampler_and_seed():
    cells = read_grid(DOCS / "examples" / "grid.toml")
    assert len(cells) == 2 * 3 * 2
    by_sampler = {cell.settings["sampler"]: cell.config for cell in cells}
    assert {name: config.exact for name, config in by_sampler.items()} == {
        "exact": True,
        "hf": False,
        "rounded": False,
    }
    assert by_sampler["hf"].sampler == "hf"
    assert by_sampler["rounded"].perturb.gain == 8.0


def test_the_grid_of_the_page_about_mismatch_has_a_late_sampler():
    cells = read_grid(DOCS.parent / "benchmarks" / "late_demo.toml")
    assert len(cells) == 3 * 3
    late = {cell.settings["sampler"]: cell.config for cell in cells}
    assert [late[name].perturb.delay for name in ("exact", "late", "late_truncated")] == [0, 1, 1]
    assert [late[name].loss.correction for name in late] == ["none", "none", "truncate"]


def test_the_recipe_reads_gsm8k_as_it_is(tmp_path):
    config = load_config(DOCS / "examples" / "qwen3_gsm8k.toml")
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(40)]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Jsonl(**config.task.options | {"file": str(file)})
    assert (len(task.problems("train")), len(task.problems("held_out")), task.chat) == (38, 2, True)
    problem = task.problems("train")[0]
    assert problem.prompt.startswith("What is ")
    assert problem.prompt.endswith("the final answer within \\boxed{}. /no_think")
    reward = NAMED_REWARDS[config.task.reward]
    assert reward(problem, f"So it is \\boxed{{{problem.answer}}}.") == 1.0
    assert reward(problem, "So it is \\boxed{7}.") == 0.0


@pytest.mark.parametrize("name", ["gap", "gap_again", "late", "rare_tokens", "real/gap"])
def test_the_experiments_of_the_page_are_grids_with_controls_and_hypotheses(name):
    """Every run without a mismatch is exact, every other one has no correction but the one that names it."""
    path = DOCS.parent / "benchmarks" / f"{name}.toml"
    cells = read_grid(path)
    assert len(read_hypotheses(path, cells)) >= 3
    assert {cell.config.exact for cell in cells if not cell.config.sampler_differs} == {True}
    for cell in cells:
        corrected = cell.config.loss.correction != "none"
        assert corrected == cell.settings["run"].endswith(("_tis", "_mis", "_mis_token", "_icepop", "_full"))


@pytest.mark.parametrize(
    ("grid", "result"),
    [
        ("gap", "cpu/gap"),
        ("gap_again", "cpu/gap_again"),
        ("late", "cpu/late"),
        ("step_size", "cpu/step_size"),
        ("kinds", "cpu/kinds"),
        ("length", "cpu/length"),
        ("length_again", "cpu/length_again"),
        ("rare_tokens", "cpu/rare_tokens"),
        ("real/gap", "h100/real_gap"),
        ("real/gap_again", "h100/real_gap_again"),
    ],
)
def test_the_committed_result_of_an_experiment_is_that_of_its_grid(grid, result):
    """What the page draws was made by the grid as it stands, and its verdicts follow from its figures."""
    result = json.loads((DOCS.parent / "benchmarks" / "results" / f"{result}.json").read_text())
    path = DOCS.parent / "benchmarks" / f"{grid}.toml"
    assert result["grid"] == path.read_text()
    cells = read_grid(path)
    assert sum(len(c["runs"]) for c in result["combinations"]) == len(cells)
    assert judged(read_hypotheses(path, cells), result["combinations"]) == result["hypotheses"]


@pytest.fixture
def model(tmp_path) -> Path:
    return random_model(tmp_path, ONE_LAYER)


def test_a_runs_rollouts_are_a_log_that_an_audit_finds_equal(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    settings = "--steps 2 --prompts 2 --num_generations 2 --sampling.max_tokens 6 --workers 1 --threads 1"
    settings += " --sampling.min_p 0.05 --sampling.logit_bias.9 2.5"
    task = (
        "--evaluation.every 0 --task.options.max_value 9 --task.options.train 20 --task.options.held_out 10"
    )
    assert (
        cli.main(["train", "--model", str(model), "--run_dir", "run", *settings.split(), *task.split()]) == 0
    )
    torch.set_num_threads(threads)

    def audit(temperature: float, out: str) -> int:
        config = Path("run/config.toml")
        config.write_text(
            re.sub(r"(?m)^temperature = 1.0", f"temperature = {temperature}", config.read_text())
        )
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["to_log.py", "run"])
        runpy.run_path(str(DOCS / "examples" / "to_log.py"))
        Path("log.jsonl").write_text(capsys.readouterr().out)
        words = ["--weight_version", "0", "--dtype", "float32", "--out", out]
        return cli.main(["audit", str(model), "--sampler", "log.jsonl", *words])

    assert audit(1.0, "same") == 0
    assert json.loads(Path("same/audit.json").read_text())["frac_equal"] == 1.0
    assert audit(0.9, "control") == 1  # not the temperature that the tokens were drawn at


def test_the_notebook_cells_plot_a_comparison(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    for name in ("demo", "again"):
        made_run(tmp_path / "runs" / name, steps=20)
    monkeypatch.chdir(tmp_path)
    section = (DOCS / "report.md").read_text().split("## In a notebook")[1].split("\n## ")[0]
    cells = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(cells) == 3
    names: dict = {}
    for cell in cells:
        exec(compile(cell, "docs/report.md", "exec"), names)
    lines = matplotlib.pyplot.gca().get_lines()
    assert [line.get_label() for line in lines] == ["demo", "again"]
    assert len(lines[0].get_ydata()) == 20
    assert names["runs"]["demo"].ledger.chain in capsys.readouterr().out
    assert len(names["last"]) == 8
