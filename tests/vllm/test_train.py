"""`train --sampler vllm-zerokl` gives the weights and the fingerprint of a run with the native sampler."""

import json
import shutil
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


VLLM = ("--sampler", "vllm-zerokl")


def _ends(run: Path, *words: str) -> tuple[str, str]:
    """Train by the command line: the fingerprint and the weights of the run, which must be exact."""
    process = run_python("-m", "zerokl", "train", "--run_dir", str(run), *words)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
    assert summary["steps"] > 1
    return summary["fingerprint"], summary["weights"]


def _fingerprint(model: Path, run: Path, *words: str) -> tuple[str, str]:
    write_letters_reward(run.parent)
    rewarded = ("--task.reward", "letters_reward:reward", "--task.directory", str(run.parent))
    return _ends(run, "--preset", "demo", *RUN, *rewarded, "--model", str(model), *words)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_fingerprint_is_that_of_the_native_sampler(model, tmp_path, dtype):
    native = _fingerprint(model, tmp_path / "native", "--dtype", dtype)
    words = ("--dtype", dtype, *VLLM)
    assert _fingerprint(model, tmp_path / "vllm", *words) == native
    separate_process = ("--vllm.multiprocess", "true")
    assert _fingerprint(model, tmp_path / "separate", *words, *separate_process) == native
    other_seed = _fingerprint(model, tmp_path / "other", "--dtype", dtype, "--seed", "1")
    assert other_seed[1] != native[1], "the seed must matter"


BF16 = ("--dtype", "bfloat16")
COMPUTED_WITH = {
    # vLLM draws from the merged weights, so it needs no adapters of its own.
    "adapters": (*BF16, "--lora.rank", "4", "--lora.alpha", "128"),
    # Without merging, vLLM's model has them beside the weights, in the trainer's memory too.
    "adapters beside": (*BF16, "--lora.rank", "4", "--lora.alpha", "128", "--lora.merge", "false"),
    # Frozen weights follow the trained ones, so the embedding does not lie first here.
    "frozen": (*BF16, "--frozen", "model.embed_tokens.*", "--frozen", "model.layers.0.mlp.*"),
    # The critic's head lies between the trained weights and the frozen ones.
    "critic": ("--loss.preset", "ppo", "--loss.advantage", "gae", "--frozen", "model.embed_tokens.*"),
    "kv": (*BF16, "--precision.kv", "int8/token_head"),
}


@pytest.mark.parametrize("separate_process", [pytest.param("false", marks=pytest.mark.full), "true"])
@pytest.mark.parametrize(
    "what", [pytest.param(x, marks=() if x == "adapters beside" else pytest.mark.full) for x in COMPUTED_WITH]
)
def test_vllm_draws_with_what_the_trainer_computes_with(model, tmp_path, what, separate_process):
    words = COMPUTED_WITH[what]
    native = _fingerprint(model, tmp_path / "native", *words)
    vllm = (*VLLM, "--vllm.multiprocess", separate_process)
    assert _fingerprint(model, tmp_path / "vllm", *words, *vllm) == native


@pytest.mark.full
def test_vllm_draws_with_adapters_of_experts_beside_their_matrices(moe, tmp_path):
    words = COMPUTED_WITH["adapters beside"]
    native = _fingerprint(moe, tmp_path / "native", *words)
    assert _fingerprint(moe, tmp_path / "vllm", *words, *VLLM) == native


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
    vllm = (*VLLM, "--vllm.max_batch_tokens", "200")
    assert _ends(tmp_path / "native", *words) == _ends(tmp_path / "vllm", *words, *vllm)


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
    assert _ends(tmp_path / "native", *words) == _ends(tmp_path / "vllm", *words, *VLLM)


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
    words = ("--model", str(talkative), "--dtype", dtype, *ACTING)
    native = _ends(tmp_path / "native", *words)
    assert _ends(tmp_path / "vllm", *words, *VLLM) == native
    if dtype == "bfloat16":
        assert _ends(tmp_path / "uncached", *words, *VLLM, "--vllm.prefix_caching", "false") == native
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
    words = [*PLAYING, "--task.name", task, *GAMES[task], *players[task], "--dtype", dtype]
    assert _ends(tmp_path / "native", *words) == _ends(tmp_path / "vllm", *words, *VLLM)
    lines = [json.loads(line) for line in (tmp_path / "vllm" / "rollouts.jsonl").read_text().splitlines()]
    assert max(len(line["turn_rewards"]) for line in lines) > 1
    assert len({line["reward"] for line in lines}) > 1, "there is something to learn"
