"""Bad input is one line and exit code 2, and changes no file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from zerokl.cli import main


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
        ({"model.name": "model"}, "model is a value, no section; did you mean model?"),
        ({"dtype": "fp8"}, "in 8 bits zerokl has weights (precision.weights of train, or perturb.weights"),
        ({"config": "a.toml"}, "the file is given without an option: zerokl train FILE"),
        ({"steps": "many"}, "config: steps ('many')"),
        ({"model": "./nowhere"}, "./nowhere is no folder"),
        ({"model": "nowhere"}, "nowhere is no folder"),
        ({"model": "init:huge"}, "preset huge is not known; choose mini, tiny, small"),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sampling]\ntemprature = 1.0\n", "did you mean sampling.temperature?"),
        ('[model]\nname = "owner/name"\n', "unknown key model.name; model is a value, no section"),
    ],
)
def test_a_mistyped_key_in_a_file_names_the_nearest(folder, refused, text, message):
    (folder / "c.toml").write_text(text)
    assert message in refused("train", "c.toml", "--run_dir", "run")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n', "problems.jsonl line 2 is not JSON"),
        ('{"prompt": "1+1="}\n', 'problems.jsonl line 1 must have an "answer"'),
        ("", "problems.jsonl holds no problems"),
        ('{"prompt": "' + "1" * 600 + '", "answer": "2"}\n', "600 tokens"),
        ('{"prompt": "\u4e2d", "answer": "2"}\n', "a character that the tokenizer does not know"),
        ('{"prompt": "", "answer": "2"}\n', "this one is empty"),
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
    "layers": "num_hidden_layers (1000000000) must be at most",
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
    "missing tokenizer": "copy the tokenizer's files of the model that it was trained from into it",
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
        (["sample", "model", "--prompt", "1", "--min-p", "1.5"], "min_p (1.5)"),
        (
            ["sample", "model", "--prompt", "1", "--repetition-penalty", "1.1"],
            "sample: --repetition_penalty is refused: a penalty makes",
        ),
        (
            ["audit", "model", "--sampler", "hf", "--min-p", "0.1", "--out", "out"],
            "hf: transformers applies min_p after top_p",
        ),
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
        (
            ["train", "--preset", "dem", "--run_dir", "run"],
            'Invalid value "dem" for --preset. Choose from: "demo", "jsonl", "turns".',
        ),
        (["train", "--run_dir", "run", "--exact=perhaps"], "exact"),
        (["train", "none.toml", "--run_dir", "run"], "none.toml cannot be read"),
        (["train", "--run_dir", "run", "--steps"], "--steps requires an argument"),
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
        ({"prompts": 10**9}, "GB of memory, and this machine has"),
    ],
    ids=str,
)
def test_what_fails_in_a_step_stops_the_run_without_a_checkpoint(folder, training, refused, values, message):
    assert message in refused(*training(**values), leaves="run")
    assert not list(folder.glob("run/checkpoints/*"))


def test_a_folder_that_holds_a_run_is_refused_and_untouched(folder, training, refused):
    assert main(training()) == 0
    assert "already holds a run" in refused(*training(seed=1))


def _zerokl(words: list[str], cwd: Path, before: str = "") -> subprocess.CompletedProcess:
    """Run zerokl in a process of its own; with `before`, after this statement."""
    code = f"import sys; {before}; from zerokl.cli import main; sys.exit(main())"
    command = [sys.executable, *(["-c", code] if before else ["-m", "zerokl"]), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


@pytest.mark.full
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
            ["train", "--preset", "demo", "--run_dir", "run", "--stepz", "3"],
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


@pytest.mark.parametrize(
    ("error", "code"), [("MemoryError()", 2), ("ValueError()", 9)], ids=["memory", "control"]
)
def test_where_memory_ran_out_a_library_that_crashes_at_its_end_changes_no_exit_code(error, code):
    crash = "import atexit, os; atexit.register(os._exit, 9)"
    ended = f"import zerokl.cli as cli; cli._outcome = lambda argv: (2, {error}); cli.run()"
    assert subprocess.run([sys.executable, "-c", f"{crash}; {ended}"]).returncode == code
