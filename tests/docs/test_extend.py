"""docs/extend.md: its examples do what the page says; its diffs and a new family pass the source's tests."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import zerokl
from zerokl.audit.frameworks import FRAMEWORKS
from zerokl.cli import main
from zerokl.docs._frameworks import frameworks
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.runs import init as initialise
from zerokl.model.config import ModelConfig

from tests.helpers import DTYPES
from tests.law import accuracy, rows
from tests.random_model import ONE_LAYER, random_model

ROOT = Path(zerokl.__file__).parent
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(autouse=True)
def _as_a_user(tmp_path, monkeypatch):
    """The working directory is a fresh one, and the examples' modules lie on the path."""
    before = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("extend"), ONE_LAYER)


@pytest.fixture
def train(model):
    """train(run, **settings): the summary of a run of two steps. Dots are written as two underscores."""
    base = {
        "model": model,
        "steps": 2,
        "prompts": 2,
        "num_generations": 3,
        "virtual_shards": 2,
        "workers": 1,
        "threads": 1,
        "task__name": "mytask:Reverse",
        "task__options__length": 3,
        "task__options__train": 20,
        "task__options__held_out": 10,
        "task__reward": "mytask:closeness",
        "sampling__max_tokens": 6,
        "evaluation__every": 1,
        "optimizer__lr": 1e-2,
    }

    def run(name: str, **settings: object) -> dict:
        pairs = (base | settings).items()
        words = [word for key, value in pairs for word in (f"--{key.replace('__', '.')}", str(value))]
        assert main(["train", "--run_dir", name, *words]) == 0
        return json.loads(Path(name, "summary.json").read_text())

    return run


def rollouts(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


# A task and a reward


def test_a_run_trains_exactly_on_the_task_with_the_reward(train):
    import mytask

    summary = train("run")
    assert (summary["mismatch_max_abs"], summary["tokens_unequal"]) == (0.0, 0)
    assert summary["tokens"] > 0
    assert summary["held_out_reward"] is not None
    assert summary["held_out_accuracy"] is None  # closeness is graded
    problems = {p.id: p for p in mytask.Reverse(3, 20, 10).problems("train")}
    lines = rollouts("run")
    assert len(lines) == 2 * 2 * 3
    for line in lines:
        problem = problems[line["problem"]]
        assert line["prompt_text"] == problem.prompt
        assert line["reward"] == mytask.closeness(problem, line["text"])
    assert len({line["reward"] for line in lines}) > 1  # so that there was a gradient
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["grad_norm"] > 0


def test_control_a_sampler_with_noise_is_not_the_trainer(train):
    summary = train("run", exact="false", perturb__logit_noise=0.01)
    assert summary["mismatch_max_abs"] > 0
    assert summary["tokens_unequal"] > 0


def test_another_reward_is_another_run(train):
    Path("length.py").write_text("def length(problem, completion):\n    return float(len(completion))\n")
    weights = train("one")["weights"]
    assert train("two")["weights"] == weights
    assert train("three", task__reward="length:length")["weights"] != weights


def test_the_task_solves_itself_and_makes_a_base_model(monkeypatch):
    import mytask

    task = mytask.Reverse(length=5, train=20, held_out=10)
    for split, n in (("train", 20), ("held_out", 10)):
        assert len(task.problems(split)) == n
        for reward in (task.reward, mytask.closeness):
            assert all(reward(p, p.answer) == 1.0 and reward(p, "") == 0.0 for p in task.problems(split))
    monkeypatch.setitem(initialise.PRESETS, "tiny", ONE_LAYER)
    words = "--task mytask:Reverse --task.options.length 1 --task.options.train 20 --task.options.held_out 5"
    words += " --target 0.02 --solved 0 1"
    assert main(["init", "base", *words.split()]) == 0
    assert json.loads(Path("base/perfectible.json").read_text())["options"]["length"] == 1


def test_the_tasks_own_refusal_is_one_line(capsys, model):
    words = ["train", "--run_dir", "run", "--model", str(model), "--task.name", "mytask:Reverse"]
    assert main([*words, "--task.options.length", "0"]) == 2
    assert capsys.readouterr().err == "zerokl: task reverse: length (0) must lie in 1 to 20\n"


# A loss


def test_dual_clip_is_its_equation_and_its_slope_the_derivative():
    from mysurrogate import dual_clip

    logp = torch.linspace(-3, 3, 601, dtype=torch.float64).repeat(2).requires_grad_()
    A = torch.tensor([1.5, -0.5], dtype=torch.float64).repeat_interleave(601)
    r = logp.exp()
    clipped = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    equation = torch.where(A < 0, torch.maximum(clipped, 3.0 * A), clipped)
    with torch.no_grad():
        value, slope = dual_clip(r, A, logp, 0.8, 1.2)
    assert torch.equal(value, equation)
    assert torch.allclose(torch.autograd.grad(equation.sum(), logp)[0], slope, rtol=1e-14, atol=0)
    assert (value != clipped).any()  # control: the floor was reached


def test_the_slopes_of_the_page_are_checked_when_a_run_begins(train, monkeypatch, capsys):
    import mysurrogate

    settings = {"loss__preset": "grpo", "loss__surrogate": "mysurrogate:truncated_weight"}
    assert train("weight", **settings)["tokens_unequal"] == 0
    taken = mysurrogate.truncated_weight
    monkeypatch.setattr(
        mysurrogate, "truncated_weight", lambda r, A, logp, low, high: taken(r, A, logp, low, high, r)
    )
    with pytest.raises(AssertionError):
        train("refused", **settings)
    capsys.readouterr()
    monkeypatch.setattr(mysurrogate, "dual_clip", lambda r, A, logp, low, high: (r * A, A))
    with pytest.raises(AssertionError):
        train("no ratio", loss__preset="grpo", loss__surrogate="mysurrogate:dual_clip")
    assert capsys.readouterr().err.strip() in (EXAMPLES.parent / "extend.md").read_text()


def test_a_run_trains_with_the_surrogate(train, monkeypatch):
    import mysurrogate

    settings = {"loss__preset": "grpo", "loss__surrogate": "mysurrogate:dual_clip", "updates_per_rollout": 2}
    summary = train("dual", **settings)
    assert (summary["mismatch_max_abs"], summary["tokens_unequal"]) == (0.0, 0)
    assert (
        train("clip", **settings | {"loss__surrogate": "zerokl.engine.train.losses.surrogates:clip"})["steps"]
        == 2
    )
    # Control: a floor below every ratio takes the slope of every bad completion.
    monkeypatch.setattr(mysurrogate, "FLOOR", 0.5)
    assert train("floor", **settings)["weights"] != summary["weights"]


# A kernel


def relu2_op() -> rows.Op:
    from relu2_mul import relu2_mul

    return rows.OPS["silu_mul"]._replace(run=lambda x, *_: (relu2_mul(x[0]),))


PLACES = [(1, 5, 3), (7, 130, 1), (33, 37, 70), (100, 1, 129), (257, 64, 33)]


def unequal(op: rows.Op, dtype: torch.dtype) -> int:
    cases = enumerate(itertools.product(PLACES, rows.POISON))
    return sum(rows.unequal_rows(op, dtype, *place, poison, seed) for seed, (place, poison) in cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_relu2_mul_is_independent_of_the_others(dtype):
    assert unequal(relu2_op(), dtype) == 0


def test_control_a_scale_of_the_whole_batch_is_found():
    from relu2_mul import relu2_mul

    def scaled(x: rows.Rows, *_: int) -> rows.Rows:
        return (relu2_mul(x[0] / x[0].detach().abs().max()),)

    assert unequal(relu2_op()._replace(run=scaled), torch.float32) > 0


def plain_relu2_mul(gu: torch.Tensor) -> torch.Tensor:
    g, u = gu.chunk(2, 1)
    return F.relu(g).square() * u


def relu2_accuracy() -> accuracy.Op:
    from relu2_mul import relu2_mul

    return accuracy.Op(((150, 200),), relu2_mul, plain_relu2_mul)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu2_mul_is_at_most_twice_as_far_from_fp64_as_plain_torch(dtype):
    accuracy.assert_accurate(relu2_accuracy(), dtype)


def test_relu2_mul_passes_gradcheck():
    assert torch.autograd.gradcheck(relu2_accuracy().ours, accuracy.inputs(((5, 14),), torch.float64, 3))


def test_control_a_wrong_slope_is_found(monkeypatch):
    import relu2_mul

    right = relu2_mul.relu2_mul_bwd_ref
    monkeypatch.setattr(relu2_mul, "relu2_mul_bwd_ref", lambda dy, gu: right(dy, gu) * 1.001)
    with pytest.raises(AssertionError, match="gradient of input 0: largest error"):
        accuracy.assert_accurate(relu2_accuracy(), torch.float32)


def test_relu2_mul_refuses_a_bad_shape():
    from relu2_mul import relu2_mul

    with pytest.raises(ValueError, match=r"relu2_mul: gu \(5, 7\) must be \[T, 2 I\]"):
        relu2_mul(torch.zeros(5, 7))


# The diffs of the page, in a copy of the source


def apply(diff: Path, root: Path) -> None:
    """Each hunk (@@) takes the place of its old lines, which must stand in the file exactly once."""
    for part in diff.read_text().split("--- a/")[1:]:
        head, *hunks = part.split("@@\n")
        file = root / head.split("\n")[0]
        for hunk in hunks:
            lines = hunk.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[:1] != mark) + "\n" for mark in "+-")
            text = file.read_text()
            assert ("\n" + text).count("\n" + old) == 1, f"{diff.name} does not fit {file}; once:\n{old}"
            file.write_text(text.replace(old, new))


# A family that zerokl has not, by the page's recipe: one file, and a row of the tests' checkpoints.
SEED_OSS = '''"""Seed-OSS: Llama's layer, with a bias of queries, keys and values."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    if config.raw.get("residual_dropout"):
        config.refuse("residual_dropout", config.raw["residual_dropout"], "set it to 0")
    bias, o_bias = config.fields.attention_bias, config.raw["attention_out_bias"]
    return [pre_norm(Attention(bias, o_bias), GatedMlp())] * config.fields.num_hidden_layers


FAMILY = Family("SeedOssForCausalLM", layers, small={"residual_dropout": 0.0, "attention_dropout": 0.0})
'''
SEED_OSS_CHECKPOINT = """    "seed_oss": __import__("transformers").SeedOssConfig(
        **_SIZE,
        head_dim=32,
        attention_dropout=0.0,
        residual_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
    ),
"""


def add_family(source: Path) -> None:
    (source / "model" / "families" / "seed_oss.py").write_text(SEED_OSS)
    checkpoints = source / "tests" / "model" / "checkpoints.py"
    first = "FAMILIES: dict[str, PretrainedConfig] = {\n"
    text = checkpoints.read_text()
    assert text.count(first) == 1
    checkpoints.write_text(text.replace(first, first + SEED_OSS_CHECKPOINT))


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the package and its tests."""
    copy = tmp_path / "zerokl"
    floors = ("files", "kernels", "verify", "model", "engine", "audit", "integrations", "cli")
    for folder in (*floors, "docs", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copyfile(file, copy / file.name)
    return copy


def run_there(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in the copy of the source."""
    environment = os.environ | {"PYTHONPATH": str(source.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)


def add_framework(source: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Put the framework of the page into the copy, and run the source's own tests of it."""
    shutil.copy(EXAMPLES / "myframework.jsonl", source / "tests/audit/log_samples")
    (source / "audit/frameworks/myframework.py").write_text(text)
    words = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "myframework or every_log",
    )
    return run_there(source, *words, "tests/audit/formats/test_frameworks.py")


@pytest.mark.full
def test_a_frameworks_file_is_all_that_its_log_needs(source):
    convert = ("-m", "zerokl", "convert", str(EXAMPLES / "myframework.jsonl"), "log.jsonl")
    assert "is not of a known format" in run_there(source, *convert).stderr
    done = add_framework(source, (EXAMPLES / "myframework.py").read_text())
    assert (done.returncode, "4 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert run_there(source, *convert, "--format", "myframework").returncode == 0
    assert json.loads((source / "log.jsonl").read_text())["logprobs"] == pytest.approx([-0.01, -0.41])


@pytest.mark.full
def test_control_a_reader_that_leaves_out_what_its_file_declares_is_found(source):
    lines = (EXAMPLES / "myframework.py").read_text().splitlines(keepends=True)
    done = add_framework(source, "".join(line for line in lines if "step=" not in line))
    assert done.returncode == 1
    assert "test_a_reader_tells_what_its_file_declares[myframework]" in done.stdout


def test_a_framework_without_a_page_has_a_section_of_the_index(monkeypatch):
    framework = replace(FRAMEWORKS["nemo-rl"], title="My framework", page="")
    monkeypatch.setitem(FRAMEWORKS, "myframework", framework)
    assert "[My framework](#my-framework)" in frameworks()
    assert "`generation_logprobs`" in frameworks().partition("## My framework")[2]


def test_control_the_source_has_none_of_it_yet():
    with pytest.raises(ValueError, match="'SeedOssForCausalLM' is not supported"):
        ModelConfig.from_dict({"architectures": ["SeedOssForCausalLM"]})
    with pytest.raises(ValueError, match="dual_clip"):
        LossConfig(preset="dual_clip")
    assert "relu2_mul" not in rows.OPS


def test_control_a_diff_fits_once_only(source):
    apply(EXAMPLES / "dual_clip.diff", source)
    with pytest.raises(AssertionError, match="does not fit"):
        apply(EXAMPLES / "dual_clip.diff", source)


_OF_A_SETTING = """
from zerokl.cli import main
from zerokl.docs import _generate
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.ledger_head import binding

key = "optimizer.skip_above"
assert key not in binding(load_config()) and binding(load_config(None, None, {key: 2.0}))[key] == 2.0
for name, value in (("grad_skip_threshold", 1), (key, 0.5)):
    try:
        load_config(None, None, {name: value})
    except ValueError as error:
        print(error)
print(_generate.configuration().partition(f"### `{key}`")[2][:160], _generate.rules())
main(["train", "--help"])
"""


@pytest.mark.full
def test_a_setting_is_one_field_of_one_file(source):
    """Its field alone brings it into help, hints, refusals, the ledger's head and the page."""

    def shown() -> str:
        environment = os.environ | {"PYTHONPATH": str(source.parent), "COLUMNS": "160"}
        words = [sys.executable, "-c", _OF_A_SETTING]
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    assert shown() == ""  # control
    apply(EXAMPLES / "setting.diff", source)
    text = shown()
    assert "unknown key grad_skip_threshold; did you mean optimizer.skip_above?" in text
    assert "skip_above (0.5) must be at least optimizer.max_grad_norm (1.0): no gradient would" in text
    assert "Number, at least 0; default: `0.0`" in text
    assert "`0 < optimizer.skip_above < optimizer.max_grad_norm`" in text
    assert "--optimizer.skip_above" in text


@pytest.mark.full
def test_the_diffs_fit_the_source_and_its_own_tests_pass(source):
    """The loss, the model family and the kernel of the page, tested as the page says."""
    for name in ("dual_clip", "relu2_mul"):
        apply(EXAMPLES / f"{name}.diff", source)
    add_family(source)
    for name in ("relu2_mul", "relu2_mul_triton"):
        text = (EXAMPLES / f"{name}.py").read_text()
        text = text.replace("from zerokl.kernels.", "from .").replace("from relu2_mul", "from .relu2_mul")
        (source / "kernels" / f"{name}.py").write_text(text)
    files = {
        "engine/train/losses/test_loss.py": "dual_clip",
        "model/test_transformers.py": "seed_oss",
        "model/test_checkpoint.py": "seed_oss",
        "kernels/test_row_independence.py": "relu2_mul",
        "kernels/test_accuracy.py": "relu2_mul",
        "kernels/test_refusals.py": "relu2_mul",
    }
    chosen = " or ".join(dict.fromkeys(files.values()))
    words = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    done = run_there(source, *words, *(f"tests/{file}" for file in files))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    for file in files:
        assert any(file in line for line in passed), f"no test of {file} ran:\n{done.stdout}"
