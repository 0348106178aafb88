"""The command line, where bad input is one line and exit code 2 and changes no file; and the public names."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zerokl
from zerokl.cli import main
from zerokl.engine.parallel.workers import ParallelSampler
from zerokl.engine.runs import samplers

from tests.random_model import ONE_LAYER, random_model

OPTIONS = "{ max_value = 9, train = 20, held_out = 10 }"
REWARDS = """
def letters(problem, completion):
    return sum(c.isalpha() for c in completion) / 8

def nan(problem, completion):
    return float("nan")

def raises(problem, completion):
    raise RuntimeError("two\\nlines")

def huge(problem, completion):
    return 1e200 * sum(c.isalpha() for c in completion)

class Broken:
    def __init__(self):
        raise KeyError("data")

class Fails:
    chat = False

    def problems(self, split):
        return {"train": [("1+1=", "2")]}[split]

    def reward(self, problem, completion):
        return 0.0
"""


@pytest.fixture(scope="session")
def model_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("cli"), ONE_LAYER)


@pytest.fixture
def folder(model_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model, a module of rewards and nothing else."""
    shutil.copytree(model_source, tmp_path / "model")
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "syntax.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("mine", None)
    return tmp_path


@pytest.fixture
def training(folder: Path) -> Callable[..., list[str]]:
    """training(key=value, ...): the words of a short run into the folder `run`.

    A key has two underscores where the configuration's key has a dot.
    """
    base = {
        "run_dir": "run",
        "model": str(folder / "model"),
        "steps": "2",
        "prompts": "2",
        "num_generations": "2",
        "sampling__max_tokens": "6",
        "task__options": OPTIONS,
        "task__reward": "mine:letters",
        "evaluation__every": "0",
        "optimizer__lr": "1e-2",
    }

    def words(**values: object) -> list[str]:
        options = {key.replace("__", "."): str(value) for key, value in {**base, **values}.items()}
        options = {key.replace("run_dir", "run-dir"): value for key, value in options.items()}
        return ["train", *(word for key, value in options.items() for word in (f"--{key}", value))]

    return words


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*words, leaves=""): the one line that a bad command prints to stderr.

    Every file must be as before, and no file may be new, except in the folder `leaves`.
    """

    def files() -> dict[Path, bytes | None]:
        return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}

    def check(*words: str, leaves: str = "") -> str:
        before = files()
        capsys.readouterr()
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = ended.code
        error = capsys.readouterr().err
        assert code == 2, error
        assert len(error.splitlines()) == 1, error
        assert error.startswith("zerokl: ")
        after = files()
        if leaves:
            after = {p: content for p, content in after.items() if folder / leaves not in (p, *p.parents)}
        assert after == before
        return error

    return check


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    "words",
    ["sample model --prompt 1+1=", "eval model", "verify", "verify model", "audit model --out report"],
)
def test_every_command_that_computes_can_be_told_where(refused, words):
    assert 'device ("cuda"): torch finds no CUDA GPU here' in refused(*words.split(), "--device", "cuda")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer__lrr": 1}, "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ({"stepz": 1}, "unknown key stepz; did you mean steps?"),
        ({"config": "a.toml"}, "the file is given without an option: zerokl train FILE"),
        ({"steps": "many"}, "config: steps ('many')"),
        ({"model": "./nowhere"}, "./nowhere is no folder"),
        ({"model": "nowhere"}, "nowhere is no folder"),
        ({"model": "init:huge"}, "preset huge is not known; choose tiny, small"),
        ({"task__name": "addd"}, "addd is not known"),
        ({"task__options": "{ max = 1 }"}, "option max is not known; choose max_value"),
        ({"task__reward": "mine:nothing"}, "mine:nothing cannot be imported"),
        ({"task__reward": "no_such:f"}, "no_such:f cannot be imported"),
        ({"task__reward": "syntax:f"}, "syntax:f cannot be imported"),
        ({"task__name": "mine:Broken", "task__options": "{}"}, "mine:Broken"),
        ({"sampling__max_tokens": 510}, "more than the model's context (512)"),
        ({"task": "add", "task__name": "add"}, "task"),
    ],
    ids=str,
)
def test_a_bad_setting_of_a_run_is_one_line_and_leaves_nothing(training, refused, values, message):
    assert message in refused(*training(**values))


def test_a_mistyped_key_in_a_file_names_the_nearest(folder, refused):
    (folder / "c.toml").write_text("[sampling]\ntemprature = 1.0\n")
    assert "did you mean sampling.temperature?" in refused("train", "c.toml", "--run-dir", "run")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n', "problems.jsonl line 2 is not JSON"),
        ('{"prompt": "1+1="}\n', 'problems.jsonl line 1 must have an "answer"'),
        ("", "problems.jsonl holds no problems"),
        ('{"prompt": "' + "1" * 600 + '", "answer": "2"}\n', "600 tokens"),
        ('{"prompt": "\u4e2d", "answer": "2"}\n', "a character that the tokenizer does not know"),
        ('{"prompt": "", "answer": "2"}\n', "problems.jsonl line 1 must be an object"),
    ],
    ids=["malformed", "field", "empty", "long", "character", "blank"],
)
def test_a_bad_data_set_is_one_line_and_leaves_nothing(folder, training, refused, lines, message):
    (folder / "problems.jsonl").write_text(lines, encoding="utf-8")
    assert message in refused(*training(task__name="jsonl", task__options='{ file = "problems.jsonl" }'))


def test_a_held_out_prompt_that_is_too_long_is_found_before_the_first_step(folder, training, refused):
    (folder / "a.jsonl").write_text('{"prompt": "1", "answer": 2}\n')
    (folder / "b.jsonl").write_text('{"prompt": "' + "1" * 600 + '", "answer": 2}\n')
    options = '{ file = "a.jsonl", held_out_file = "b.jsonl" }'
    assert "600 tokens" in refused(*training(task__name="jsonl", task__options=options, evaluation__every=1))


# Ways to damage a checkpoint: a file is removed, a file has another content, config.json has other fields.
REMOVED = {
    "missing weights": "model.safetensors",
    "missing config": "config.json",
    "missing tokenizer": "tokenizer.json",
}
REWRITTEN = {
    "no header": ("model.safetensors", ""),
    "config is no object": ("config.json", "[]"),
    "nested": ("config.json", "[" * 200_000),
    "tokenizer is no JSON": ("tokenizer.json", "{"),
    "tokenizer is no tokenizer": ("tokenizer.json", '{"version": "1.0"}'),
    "generation config": ("generation_config.json", "[]"),
    "stop ids": ("generation_config.json", '{"eos_token_id": [[1]]}'),
}
FIELDS = {
    "heads": {"num_key_value_heads": 3},
    "vocabulary too small": {"vocab_size": 50},
    "vocabulary too large": {"vocab_size": 70},
    "architecture": {"architectures": ["GPT2LMHeadModel"]},
    "architectures": {"architectures": {"a": 1}},
    "architecture list": {"architectures": [["Qwen3ForCausalLM"]]},
    "infinite": {"vocab_size": float("inf")},
    "theta": {"rope_parameters": {"rope_theta": -5.0}},
    "layers": {"num_hidden_layers": 10**9},
    "context": {"max_position_embeddings": 10**12},
    "width": {"hidden_size": 1 << 24, "vocab_size": 1 << 24},
}


def _damage(model: Path, what: str) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "index":
        weights.unlink()
        (model / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 5}}')
    elif what in REMOVED:
        (model / REMOVED[what]).unlink()
    elif what in REWRITTEN:
        name, content = REWRITTEN[what]
        (model / name).write_text(content)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | FIELDS[what]))


# Each damage, and a part of the line that it is refused with.
DAMAGE = {
    "architectures": "is not supported; supported are",
    "architecture list": "is not supported; supported are",
    "infinite": "is no JSON number",
    "theta": "rope_theta (-5.0) must lie in 1 to",
    "layers": "layers (1000000000) is larger than zerokl takes",
    "context": "max_positions (1000000000000) is larger than zerokl takes",
    "width": "more than this machine has memory for",
    "stop ids": "eos_token_id ([[1]]) must be a token id, or a list of them",
    "nested": "config.json is nested deeper than",
    "index": "is not a valid index of safetensors shards",
    "truncated": "model.safetensors is corrupt or incomplete",
    "no header": "model.safetensors is corrupt or incomplete",
    "missing weights": "holds no model.safetensors",
    "missing config": "holds no config.json",
    "config is no object": "config.json",
    "heads": "num_attention_heads (2) must be a multiple of num_key_value_heads (3)",
    "vocabulary too small": "has token id 63, the model's vocabulary ends at 49",
    "vocabulary too large": "has shape (64, 32), config.json asks for (70, 32)",
    "architecture": "architecture 'GPT2LMHeadModel' is not supported",
    "missing tokenizer": "holds no tokenizer",
    "tokenizer is no JSON": "tokenizer",
    "tokenizer is no tokenizer": "tokenizer",
    "generation config": "generation_config.json",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_one_line_for_every_command(folder, training, refused, what):
    _damage(folder / "model", what)
    assert DAMAGE[what] in refused("sample", "model", "--prompt", "1+1=")
    assert DAMAGE[what] in refused("eval", "model", "--task", "add")
    assert DAMAGE[what] in refused(*training())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "model", "--prompt", ""], "has no tokens"),
        (["sample", "model", "--prompt", "1+\udcff="], "is not valid Unicode"),
        (["eval", "model", "--problems", "-3"], "problems (-3) must be at least 1"),
        (["eval", "model", "--task", "mine:Fails"], "task mine:Fails: problems('held_out') raised KeyError"),
        (
            ["eval", "model", "--task", "mine:Fails", "--split", "train"],
            "which is no Problem with a prompt that is a string",
        ),
        (["sample", "model", "--prompt", "\u4e2d"], "a character that the tokenizer does not know"),
        (["sample", "model", "--prompt", "1" * 500], "more than the context (512)"),
        (["sample", "model", "--prompt", "1", "-n", "0"], "num_generations (0) must be at least 1"),
        (["sample", "model", "--prompt", "1", "--temperature", "-1"], "temperature (-1.0)"),
        (["sample", "model", "--prompt", "1", "--top-p", "0"], "top_p (0.0)"),
        (["sample", "model", "--prompt", "1", "--dtype", "int8"], 'Choose from: "float32"'),
        (
            ["sample", "model", "--prompt", "1", "--temprature", "2"],
            "Unknown option: --temprature. Did you mean --temperature?",
        ),
        (["sample", "model", "--prompt", "1", "--seed", "-1"], "seed (-1)"),
        (["sample", "model", "--prompt", "1", "--seed", "x"], "seed"),
        (["sample", "model"], "prompt"),
        (["eval", "model", "--task", "subtract"], "subtract is not known"),
        (["verify", "model", "--record"], "Unknown option: --record"),
        (["eval", "model", "--split", "test"], "split (test)"),
        (["eval", "model", "--task.reward", "mine:raises"], "reward: raised RuntimeError (two lines)"),
        (["verify", "nowhere"], "nowhere is no folder"),
        (["verify", "--dtype", "int8"], "--dtype"),
        (["verify", "--case", "nowhere"], "nowhere holds no readable mismatch.json"),
        (["init", "model"], "model already exists"),
        (["init", "new", "--task", "jsonl"], "needs a file"),
        (["init", "new", "--preset", "huge"], "preset huge is not known"),
        (["init", "new", "--task.options.max_value", "0"], "max_value (0)"),
        (["train", "--preset", "demo"], "--run_dir is missing"),
        (["train", "--preset", "dem", "--run-dir", "run"], "preset dem is not known"),
        (["train", "--run-dir", "run", "--exact=perhaps"], "exact"),
        (["train", "none.toml", "--run-dir", "run"], "none.toml cannot be read"),
        (["train", "--run-dir", "run", "--steps"], "--steps requires an argument"),
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
    ],
    ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else "",
)
def test_a_bad_command_is_one_line(refused, words, message):
    assert message in refused(*words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task__reward": "mine:nan"}, "reward: is nan for prompt"),
        ({"task__reward": "mine:raises"}, "reward: raised RuntimeError (two lines) for prompt"),
        ({"task__reward": "mine:huge", "loss__preset": "grpo"}, "reward"),
        ({"native__cache_bytes": 10}, "cache_bytes (10) cannot hold one sample"),
        ({"optimizer__lr": "1e37", "steps": 3}, "not finite"),
    ],
    ids=str,
)
def test_what_fails_in_a_step_stops_the_run_without_a_checkpoint(folder, training, refused, values, message):
    assert message in refused(*training(**values), leaves="run")
    assert not list(folder.glob("run/checkpoints/*"))


def test_a_folder_that_holds_a_run_is_refused_and_untouched(folder, training, refused):
    assert main(training()) == 0
    assert "already holds a run" in refused(*training(seed=1))


def test_a_run_that_was_refused_can_be_started_again_in_the_same_folder(training, refused, capsys):
    refused(*training(model="./nowhere"))
    assert main(training()) == 0
    end = r"mismatch 0\.0 over \d+ tokens\nplot .*reward\.png\n"
    end += r"weights [0-9a-f]{64}\nfingerprint [0-9a-f]{64}\nreport run/report\.html\n"
    end += r"run it again +zerokl train run/config\.toml --run-dir run-again\n"
    end += r"compare the two +zerokl diff run run-again\ncheck it +zerokl verify run run\n"
    end += r"train it further +zerokl train --resume run --steps 4\n$"
    assert re.search(end, capsys.readouterr().out)


def test_the_commands_printed_at_the_end_work(training, capsys):
    assert main(training(run_dir="my run")) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line.partition(" zerokl ")[2]) for line in printed if " zerokl " in line]
    assert [words[0] for words in commands] == ["train", "diff", "verify", "train"]
    for words in commands:
        assert main(words) == 0, words
    assert "equal to the bit: 2 steps" in capsys.readouterr().out


def test_with_a_schedule_over_the_steps_a_run_cannot_be_made_longer(training, capsys):
    assert main(training(optimizer__schedule="linear")) == 0
    assert "--resume" not in capsys.readouterr().out


def test_the_version_is_said_without_loading_torch():
    code = "import sys; from zerokl.cli import main; main(['--version']); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert re.fullmatch(r"zerokl \d+\.\d+\.\d+\S* \(Python .*, torch .*\)\n", result.stdout), result.stderr


def test_a_mismatch_is_one_line_and_exit_code_1(training, monkeypatch, capsys):
    class Planted(ParallelSampler):
        def generate(self, prompts, generation_params, rng_key):
            rollouts = super().generate(prompts, generation_params, rng_key)
            rollouts[1].logprobs[0] += 1
            return rollouts

    monkeypatch.setattr(samplers, "ParallelSampler", Planted)
    assert main(training()) == 1
    error = capsys.readouterr().err
    assert error.startswith("zerokl: mismatch at step 0, prompt 0, sample 1, position 0")
    assert len(error.splitlines()) == 1


def _zerokl(words: list[str], cwd: Path, before: str = "") -> subprocess.CompletedProcess:
    """Run zerokl in a process of its own; with `before`, after this statement."""
    code = f"import sys; {before}; from zerokl.cli import main; sys.exit(main())"
    command = [sys.executable, *(["-c", code] if before else ["-m", "zerokl"]), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def test_a_full_disk_while_a_checkpoint_is_written_leaves_no_part_of_it(folder, training):
    """Files may grow to 20 kB only, so the checkpoint's 60 kB fail as on a full disk.

    There is an OSError in the middle of the file.
    """
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    process = _zerokl(training(), folder, limit)
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1), process.stderr
    message = "zerokl: checkpoint: run/checkpoints/step-000002 could not be written .* nothing of it was kept"
    assert re.search(message, process.stderr)
    assert list((folder / "run" / "checkpoints").iterdir()) == []
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (folder / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sample", "someone/something", "--prompt", "1"],
            "someone/something is no local folder and could not be had from the hub",
        ),
        (
            ["train", "--preset", "demo", "--run-dir", "run", "--stepz", "3"],
            "unknown key stepz; did you mean steps?",
        ),
    ],
    ids=["hub", "key"],
)
def test_the_module_refuses_as_the_function_does(folder, words, message):
    process = _zerokl(words, folder)
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1), process.stderr
    assert message in process.stderr
    assert not (folder / "run").exists()


def test_sample_eval_and_verify_work(folder, capsys):
    assert main(["sample", "model", "--prompt", "12+7=", "-n", "4", "--max-tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert len(re.findall(r"logprob -\d+\.\d{4}  (?:stop|length)$", first, re.MULTILINE)) == 4
    main(["sample", "model", "--prompt", "12+7=", "-n", "4", "--max-tokens", "5"])
    assert capsys.readouterr().out == first
    words = "--task add --problems 7 --num-generations 2"
    words += " --task.options.max_value 9 --task.options.train 20 --task.options.held_out 9"
    assert main(["eval", "model", *words.split()]) == 0
    result = r"add held_out: mean reward 0\.\d{4} over 7 problems x 2 generations"
    assert re.search(result, capsys.readouterr().out)
    assert main(["verify", "model", "--dtype", "float32", "--sequences", "3", "--longest", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("verify 1/9")
    assert "verify 9/9  float32  gradient: threads and workers  " in out
    rows = re.findall(r"float32 +\S+ +([\d,]+) +\S+ +(\d+)", out)
    assert len(rows) >= 8
    assert all(int(n.replace(",", "")) > 0 and unequal == "0" for n, unequal in rows)


@pytest.mark.parametrize("name", zerokl.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert callable(getattr(zerokl, name))
    assert getattr(zerokl, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = zerokl.trian


@pytest.mark.parametrize(
    "code",
    ["import zerokl", "import zerokl.cli", "import zerokl.cli as c; c.main(['train', '--help'])"],
)
def test_importing_zerokl_does_not_wait_for_torch(code):
    slow_to_import = ("torch", "transformers", "matplotlib")
    check = f"import sys; {code}; sys.exit(any(m in sys.modules for m in {slow_to_import}))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_example_of_the_package_runs(model_source, tmp_path, monkeypatch):
    """The lines of zerokl's docstring, with a small model and run."""
    monkeypatch.chdir(tmp_path)
    policy = zerokl.load_policy(str(model_source))
    rollouts = policy.sample(["12+7="], n=4)
    scores = policy.score([r.pair for r in rollouts])
    assert [s.tobytes() for s in scores] == [r.logprobs.tobytes() for r in rollouts]
    overrides = {"model": str(model_source), "steps": "1", "prompts": "2", "evaluation.every": "0"}
    summary = zerokl.train(zerokl.load_config(None, "demo", overrides), "runs/demo")
    assert summary.mismatch_max_abs == 0.0
    assert all(c.holds for c in zerokl.check_law(str(model_source), ["float32"], sequences=2, longest=20))
