"""`train --sampler vllm-zerokl` gives the weights and the fingerprint of a run with the native sampler."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from zerokl.engine.runs import init as initialise
from zerokl.engine.tasks.tokenizer import character_tokenizer

from tests.helpers import write_letters_reward
from tests.random_model import TWO_LAYERS, of_long_prompts
from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

RUN = [
    *("--steps", "4", "--prompts", "8", "--num_generations", "4", "--sampling.max_tokens", "6"),
    *("--evaluation.every", "4", "--evaluation.problems", "16", "--optimizer.lr", "3e-4"),
]


def _zerokl(*words: str) -> subprocess.CompletedProcess:
    process = run_python("-m", "zerokl", *words)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return process


def _fingerprint(model: Path, run: Path, *words: str) -> tuple[str, str]:
    write_letters_reward(run.parent)
    rewarded = ("--task.reward", "letters_reward:reward", "--task.directory", str(run.parent))
    words = (*RUN, *rewarded, "--model", str(model), "--run_dir", str(run), *words)
    _zerokl("train", "--preset", "demo", *words)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
    assert summary["steps"] == 4
    return summary["fingerprint"], summary["weights"]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_fingerprint_is_that_of_the_native_sampler(model, tmp_path, dtype):
    native = _fingerprint(model, tmp_path / "native", "--dtype", dtype)
    words = ("--dtype", dtype, "--sampler", "vllm-zerokl")
    assert _fingerprint(model, tmp_path / "vllm", *words) == native
    separate_process = ("--vllm.multiprocess", "true")
    assert _fingerprint(model, tmp_path / "separate", *words, *separate_process) == native
    other_seed = _fingerprint(model, tmp_path / "other", "--dtype", dtype, "--seed", "1")
    assert other_seed[1] != native[1], "the seed must matter"


@pytest.mark.full
@pytest.mark.parametrize("separate_process", [pytest.param("false", marks=pytest.mark.full), "true"])
def test_frozen_weights_lie_in_vllm_where_they_lie_in_the_trainer(model, tmp_path, separate_process):
    """Frozen weights follow the trained ones, so the embedding does not lie first here."""
    words = ("--dtype", "bfloat16", "--frozen", "model.embed_tokens.*", "--frozen", "model.layers.0.mlp.*")
    native = _fingerprint(model, tmp_path / "native", *words)
    vllm = ("--sampler", "vllm-zerokl", "--vllm.multiprocess", separate_process)
    assert _fingerprint(model, tmp_path / "vllm", *words, *vllm) == native


@pytest.mark.full
@pytest.mark.parametrize("separate_process", ["false", "true"])
def test_vllm_rounds_keys_and_values_as_the_trainer_does(model, tmp_path, separate_process):
    words = ("--dtype", "bfloat16", "--precision.kv", "int8/token_head")
    native = _fingerprint(model, tmp_path / "native", *words)
    vllm = ("--sampler", "vllm-zerokl", "--vllm.multiprocess", separate_process)
    assert _fingerprint(model, tmp_path / "vllm", *words, *vllm) == native


@pytest.mark.full
def test_vllm_sums_attention_in_the_trainers_order(model, tmp_path):
    """Over contexts of several chunks, read in parts and from vLLM's prefix cache.

    The control is in tests/engine/runs/test_chunked_runs.py: the default's order has other weights.
    """
    settings = of_long_prompts(model, tmp_path) | {"task.reward": "letters_reward:reward"}
    settings |= {"precision.attention": "chunked-512"}
    write_letters_reward(tmp_path)
    options = f"{{ file = '{settings['task.options']['file']}', chat = false }}"
    settings |= {"task.directory": str(tmp_path), "task.options": options}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    words += ["--steps", "2", "--prompts", "3", "--num_generations", "2", "--sampling.max_tokens", "8"]
    words += ["--evaluation.every", "0", "--optimizer.lr", "1e-2", "--dtype", "bfloat16"]
    vllm = ("--sampler", "vllm-zerokl", "--vllm.max_batch_tokens", "200")
    ends = {}
    for name, more in {"native": (), "vllm": vllm}.items():
        run = tmp_path / name
        _zerokl("train", "--run_dir", str(run), *words, *more)
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
        ends[name] = summary["fingerprint"], summary["weights"]
    assert ends["native"] == ends["vllm"]


@pytest.mark.full
def test_a_critics_head_lies_among_the_weights_that_vllm_reads(model, tmp_path):
    """The head lies between the trained weights and the frozen ones."""
    critic = ("--loss.preset", "ppo", "--loss.advantage", "gae", "--frozen", "model.embed_tokens.*")
    native = _fingerprint(model, tmp_path / "native", *critic)
    vllm = ("--sampler", "vllm-zerokl", "--vllm.multiprocess", "true")
    assert _fingerprint(model, tmp_path / "vllm", *critic, *vllm) == native


@pytest.mark.parametrize("separate_process", [pytest.param("false", marks=pytest.mark.full), "true"])
def test_adapters_are_merged_where_vllm_reads_the_weights(model, tmp_path, separate_process):
    """vLLM draws from the merged weights, so it needs no adapters of its own."""
    words = ("--dtype", "bfloat16", "--lora.rank", "4", "--lora.alpha", "128")
    native = _fingerprint(model, tmp_path / "native", *words)
    vllm = ("--sampler", "vllm-zerokl", "--vllm.multiprocess", separate_process)
    assert _fingerprint(model, tmp_path / "vllm", *words, *vllm) == native


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(x, marks=pytest.mark.proof) for x in ("float32", "float16"))]
)
def test_reasonings_and_answers_have_one_fingerprint(model, tmp_path, dtype):
    """The prompts of answers hold cuts of reasonings, which the prefix cache of vLLM may have."""
    write_letters_reward(tmp_path)
    words = [
        *("--task.name", "add", "--task.reward", "letters_reward:reward", "--task.directory", str(tmp_path)),
        *("--loss.preset", "brpo", "--task.answer_prefix", "=", "--loss.answers", "2"),
        *(word for budget in ("1", "5", "8") for word in ("--loss.budgets", budget)),
        *("--sampling.max_tokens", "8", "--sampling.answer_max_tokens", "5"),
        *("--steps", "3", "--prompts", "4", "--num_generations", "3", "--optimizer.lr", "1e-2"),
        *("--evaluation.every", "3", "--dtype", dtype, "--model", str(model)),
    ]
    ends = []
    for sampler in ("native", "vllm-zerokl"):
        run = tmp_path / sampler
        _zerokl("train", "--run_dir", str(run), "--sampler", sampler, *words)
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
        ends.append((summary["fingerprint"], summary["weights"]))
    assert ends[0] == ends[1]


def _proof_but(in_ci: object, case: object) -> object:
    """The case; one of CI's other than `in_ci` is left to `make test-proofs`."""
    values = case if isinstance(case, tuple) else (case,)
    return case if case == in_ci else pytest.param(*values, marks=pytest.mark.proof)


ACTS = Path(__file__).parents[1] / "engine" / "rollout"
ACTING = [
    *("--task.name", "acts:echo", "--task.directory", str(ACTS), "--environment.processes", "1"),
    *("--steps", "3", "--prompts", "4", "--num_generations", "4", "--sampling.max_tokens", "12"),
    *("--optimizer.lr", "1e-2", "--evaluation.every", "0"),
]


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", [_proof_but("bfloat16", dtype) for dtype in DTYPES])
def test_trajectories_of_many_turns_have_one_fingerprint(model, tmp_path, dtype):
    """In an environment; vLLM's prefix cache has the earlier turns."""
    talkative = tmp_path / "model"
    shutil.copytree(model, talkative)
    (talkative / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(40, 60)]}))
    ends = {}
    uncached = ("--sampler", "vllm-zerokl", "--vllm.prefix_caching", "false")
    for name, words in {
        "native": (),
        "vllm": ("--sampler", "vllm-zerokl"),
        **({"uncached": uncached} if dtype == "bfloat16" else {}),
    }.items():
        run = tmp_path / name
        _zerokl("train", "--run_dir", str(run), "--model", str(talkative), "--dtype", dtype, *ACTING, *words)
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
        ends[name] = summary["fingerprint"], summary["weights"]
    assert len(set(ends.values())) == 1, ends
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "rollouts.jsonl").read_text().splitlines()]
    assert max(len(line["turn_rewards"]) for line in lines) == 3


NIM = {"max_stones": 12, "train": 24}
GAMES = {
    "nim": [word for key, value in NIM.items() for word in (f"--task.options.{key}", str(value))],
    # The random model draws an operation or an answer, and its end.
    "calculator": ["--task.options", "{ max_value = 1, train = 12, held_out = 4 }"],
}
PLAYING = [
    *("--preset", "turns", "--steps", "3", "--prompts", "4", "--num_generations", "8"),
    *("--evaluation.every", "0", "--sampling.max_tokens", "4", "--environment.processes", "1"),
]
PAIRS = [(task, dtype) for task in GAMES for dtype in DTYPES]


@pytest.fixture(scope="module")
def players(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The words that name a model for each game. That of nim has learnt the rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(initialise.PRESETS, "test", TWO_LAYERS | {"head_dim": 32})
        nim = tmp_path_factory.mktemp("nim") / "model"
        initialise.initialise(nim, "nim", NIM, "test")
    ids = character_tokenizer().convert_tokens_to_ids(["<eos>", *"01*="])
    allowed = [word for i in ids for word in ("--sampling.allowed_token_ids", str(i))]
    return {"nim": ["--model", str(nim)], "calculator": ["--model", str(model), *allowed]}


@pytest.mark.parametrize(("task", "dtype"), [_proof_but(("nim", "float16"), pair) for pair in PAIRS])
def test_a_game_of_two_players_and_a_tool_have_one_fingerprint(players, tmp_path, task, dtype):
    words = ["--task.name", task, *GAMES[task], *players[task], "--dtype", dtype]
    ends = {}
    for name, more in {"native": (), "vllm": ("--sampler", "vllm-zerokl")}.items():
        run = tmp_path / name
        _zerokl("train", "--run_dir", str(run), *PLAYING, *words, *more)
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
        ends[name] = summary["fingerprint"], summary["weights"]
    assert ends["native"] == ends["vllm"]
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "rollouts.jsonl").read_text().splitlines()]
    assert max(len(line["turn_rewards"]) for line in lines) > 1
    assert len({line["reward"] for line in lines}) > 1, "there is something to learn"
