"""torchrun with 1, 2, 4 or 8 ranks gives one ledger, and a run goes on with another number of ranks.

A rank that dies ends the job with a reason.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config, ParallelConfig
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.parallel.data_parallel import RankedScorer
from zerokl.engine.train.parallel.process_group import ALONE
from zerokl.engine.train.parallel.scorer import frozen
from zerokl.model.checkpoint import load_decoder
from zerokl.model.weights import VALUE_HEAD_TENSOR

from tests.engine.runs.exact_runs import forget_end
from tests.forked import ended_ranks, run_ranks
from tests.helpers import needs_gpus, torchrun, total_unequal
from tests.random_model import EXPERTS, random_model


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.proof), "bfloat16"])
def plain(request, config) -> Config:
    return config(dtype=request.param, steps=4, checkpoint__every=2, virtual_shards=8, evaluation__every=2)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    train(plain, path)
    return path


@pytest.fixture(scope="module")
def brief(config) -> Config:
    return config(steps=4, checkpoint__every=2, evaluation__every=2)


def _launch(ranks: int, words: list[str], cwd: Path) -> subprocess.Popen:
    return _process(torchrun(ranks, "-m", "zerokl", "train", *words), cwd, {"OMP_NUM_THREADS": "1"})


def _process(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.Popen:
    # sys.path holds the folder of the module `toy` (conftest.py), which the ranks import.
    fixed = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **fixed, **environment},
    )


def _run(ranks: int, config: Config, path: Path, *words: str) -> str:
    """What a run over ranks prints, which are forks here."""
    (path.parent / "config.toml").write_text(to_toml(config))
    train_words = ["-m", "zerokl", "train", "config.toml", "--run_dir", str(path), *words]
    return run_ranks(ranks, train_words, path.parent)


def _same(path: Path, alone: Path) -> None:
    """Weights, fingerprint, rollouts and the steps of the ledger are those of the run without ranks."""
    ranked, single = (json.loads((p / "summary.json").read_text()) for p in (path, alone))
    assert (ranked["fingerprint"], ranked["weights"]) == (single["fingerprint"], single["weights"])
    assert (path / "rollouts.jsonl").read_bytes() == (alone / "rollouts.jsonl").read_bytes()
    a, b = ([json.loads(x) for x in (p / "ledger.jsonl").open()] for p in (path, alone))
    assert [x for x in a if x["kind"] == "step"] == [x for x in b if x["kind"] == "step"]


def _same_metrics(path: Path, alone: Path) -> None:
    """No metric is lost over ranks, and those that are no times or sizes are equal."""
    for a, b in zip(*(map(json.loads, (p / "metrics.jsonl").open()) for p in (path, alone)), strict=True):
        assert a.keys() == b.keys()
        measured = {name for name in a if name.startswith(("time/", "perf/"))}
        assert {name: a[name] for name in a.keys() - measured} == {n: b[n] for n in b.keys() - measured}


def _goes_on_with_other_ranks(plain: Config, root: Path, key: str, grids: list[tuple[int, int]]) -> None:
    """A run over one grid has the checkpoint of one process, and goes on over another and in one process.

    key: that says how many ranks share something. grids: the ranks, and of which the key says how many share.
    """
    (ranks, sharing), (more, more_sharing) = grids
    train(plain, root / "alone")
    _run(ranks, plain, root / "run", f"--{key}", str(sharing))
    weights = [root / name / "checkpoints/step-000003/model.safetensors" for name in ("run", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    forget_end(root / "run")
    process = _launch(more, ["--resume", "run", f"--{key}", str(more_sharing)], root)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    _same(root / "run", root / "alone")
    forget_end(root / "run")
    resume(root / "run", {key: "1"})
    _same(root / "run", root / "alone")


@pytest.mark.parametrize(
    ("ranks", "workers", "micro_batch"),
    [
        (2, 1, 1),
        pytest.param(2, 2, 3, marks=pytest.mark.slow),
        pytest.param(4, 1, 5, marks=pytest.mark.proof),
    ],
)
def test_any_number_of_ranks_gives_one_ledger(plain, alone, tmp_path, ranks, workers, micro_batch):
    (tmp_path / "config.toml").write_text(to_toml(plain))
    settings = ["--micro_batch", str(micro_batch), "--workers", str(workers)]
    process = _launch(ranks, ["config.toml", "--run_dir", str(tmp_path / "run"), *settings], tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)
    assert len(re.findall("^fingerprint ", output, re.MULTILINE)) == 1, "only the first rank prints"


@pytest.mark.parametrize("engine", ["replicated", "fsdp"])
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=needs_gpus(1)), pytest.param(2, marks=needs_gpus(2))]
)
def test_ranks_of_nccl_have_the_ledger_of_one_process(config, tmp_path, ranks, engine):
    plain = config(dtype="bfloat16", steps=3, virtual_shards=8, device="cuda", evaluation__every=2)
    train(plain, tmp_path / "alone")
    _run(ranks, plain, tmp_path / "run", "--parallel.engine", engine)
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_ranks_share_the_classes_that_rank_0_forms(config, tmp_path):
    settings = {"loss__preset": "seed_grpo", "task__equivalence": "toy:as_many_letters", "steps": 2}
    train(config(**settings), tmp_path / "alone")
    _run(2, config(**settings), tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
@pytest.mark.parametrize("preset", ["dpo", "verifree", "brpo"])
def test_given_tokens_and_answers_are_spread_over_the_ranks(config, tmp_path, preset):
    if preset == "dpo":
        row = {"prompt": "1+1=", "chosen": "2", "rejected": "no"}
        (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"prompt": "3-1="}))
        options = {"file": str(tmp_path / "p.jsonl"), "chat": False}
        settings = {"task__name": "pairs", "task__options": options, "num_generations": 2, "prompts": 5}
    elif preset == "brpo":
        settings = {"task__answer_prefix": ">", "loss__budgets": [2, 8], "task__reward": "toy:letters"}
    else:
        settings = {"task__answer_prefix": ">", "optimizer__lr": "1e-4"}  # no rank's reasonings get too short
    cfg = config(**{"task__reward": ""} | settings, loss__preset=preset, steps=2, evaluation__every=2)
    train(cfg, tmp_path / "alone")
    _run(2, cfg, tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_values_are_scored_over_the_ranks(config, tmp_path):
    cfg = config(loss__preset="ppo", steps=3, dtype="bfloat16", updates_per_rollout=2, checkpoint__every=2)
    train(cfg, tmp_path / "alone")
    _run(2, cfg, tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")
    heads = [
        load_file(tmp_path / run / "checkpoints/step-000003/trainer/state.safetensors")[VALUE_HEAD_TENSOR]
        for run in ("alone", "run")
    ]
    assert total_unequal(heads[:1], heads[1:]) == 0
    assert heads[0].any()


@pytest.mark.parametrize("when", ["at work", pytest.param("start", marks=pytest.mark.full)])
def test_ranks_end_with_a_torchrun_that_is_killed(plain, tmp_path, when):
    """They would wait for each other, and hold the run's folder."""
    (tmp_path / "config.toml").write_text(to_toml(plain.model_copy(update={"steps": 4000})))
    process = _launch(2, ["config.toml", "--run_dir", str(tmp_path / "run")], tmp_path)
    if when == "at work":
        while process.poll() is None and not (tmp_path / "run" / "ledger.jsonl").exists():
            time.sleep(0.05)
    else:
        time.sleep(3.0)  # torchrun has started the ranks, which still import
    process.kill()
    # Their end closes the pipe.
    process.communicate(timeout=60)


@pytest.mark.full
def test_a_run_over_ranks_goes_on_alone_with_the_same_ledger(plain, alone, tmp_path):
    _run(2, plain.model_copy(update={"steps": 2}), tmp_path / "run", "--micro_batch", "5")
    resume(tmp_path / "run", {"steps": "4"})
    _same(tmp_path / "run", alone)


@pytest.mark.full
def test_ranks_with_other_numbers_of_threads_give_one_ledger(plain, alone, tmp_path):
    """As on two machines: without a setting, each rank would choose another number of workers."""
    (tmp_path / "config.toml").write_text(to_toml(plain))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "zerokl", "train", "config.toml", "--run_dir", "run"]
    command += ["--workers", "0", "--threads", "0"]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        _process(
            command,
            tmp_path,
            {**job, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": str(2 - r)},
        )
        for r in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    _same(tmp_path / "run", alone)


@pytest.mark.full
def test_sharded_weights_are_those_of_one_process(config, tmp_path):
    """fp16 with a scaled loss, clipping, several updates, four rounds; and both engines read a checkpoint."""
    settings = {"dtype": "float16", "optimizer__max_grad_norm": 0.05, "updates_per_rollout": 2}
    plain = config(**settings, steps=4, virtual_shards=16, checkpoint__every=2, evaluation__every=2)
    train(plain, tmp_path / "alone")
    sharded = plain.model_copy(update={"parallel": ParallelConfig(engine="fsdp"), "recompute": "layer"})
    _run(4, sharded, tmp_path / "run", "--micro_batch", "1")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")
    gathered, whole = (decoder_of(tmp_path / run / "checkpoints" / "step-000004") for run in ("run", "alone"))
    assert total_unequal([gathered], [whole]) == 0
    forget_end(tmp_path / "run")
    resume(tmp_path / "run", {"parallel.engine": "replicated"})
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fsdp", pytest.param("replicated", marks=pytest.mark.proof)])
def test_a_run_goes_on_with_sharded_weights_over_other_ranks(plain, alone, tmp_path, first):
    two_steps = plain.model_copy(update={"parallel": ParallelConfig(engine=first), "steps": 2})
    _run(4 if first == "fsdp" else 1, two_steps, tmp_path / "run")
    process = _launch(
        2, ["--resume", "run", "--steps", "4", "--parallel.engine", "fsdp", "--micro_batch", "2"], tmp_path
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    _same(tmp_path / "run", alone)


def decoder_of(folder: Path) -> torch.Tensor:
    return load_decoder(folder, torch.float32).flat.detach()


@pytest.mark.full
def test_frozen_weights_are_those_of_one_process(plain, tmp_path):
    """The slices of the ranks are of what is trained, and a checkpoint holds what is frozen as well."""
    frozen_layer = plain.model_copy(update={"frozen": ("model.layers.0.*",)})
    train(frozen_layer, tmp_path / "alone")
    _run(2, frozen_layer, tmp_path / "run", "--micro_batch", "2")
    _same(tmp_path / "run", tmp_path / "alone")
    forget_end(tmp_path / "run")
    resume(tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.proof)])
def test_quantised_weights_are_those_of_one_process(config, tmp_path, dtype):
    """A rank has a slice of the masters; the parts with one scale reach over slices."""
    settings = dict(dtype=dtype, steps=2, checkpoint__every=1, precision__weights="float8_e4m3fn/tensor")
    quantised = config(**settings)
    train(quantised, tmp_path / "alone")
    _run(2, quantised, tmp_path / "run", "--micro_batch", "2")
    _same(tmp_path / "run", tmp_path / "alone")
    forget_end(tmp_path / "run")
    resume(tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize(
    ("ranks", "merge", "engine"),
    [
        (2, True, "replicated"),
        pytest.param(4, True, "replicated", marks=pytest.mark.full),
        pytest.param(2, False, "fsdp", marks=pytest.mark.full),
    ],
)
def test_adapters_are_those_of_one_process(plain, tmp_path, ranks, merge, engine):
    """The slices of the ranks are of A and B, of which each rank has all to compute with."""
    lora = plain.model_copy(update={"lora": LoraConfig(rank=3, merge=merge), "steps": 2})
    train(lora, tmp_path / "alone")
    spread = "--parallel.engine", engine
    _run(ranks, lora, tmp_path / "run", "--micro_batch", "2", *spread)
    _same(tmp_path / "run", tmp_path / "alone")
    forget_end(tmp_path / "run")
    resume(tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_the_experts_of_all_tokens_travel_with_them(config, tmp_path):
    """The sampler's experts are compared in every rank, and replayed."""
    model = random_model(tmp_path, EXPERTS)
    settings = {"precision__sampler_dtype": "bfloat16", "perturb__routing": "replayed", "steps": 2}
    replayed = config(model=model, exact=False, **settings)
    train(replayed, tmp_path / "alone")
    _run(2, replayed, tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_older_weights_and_a_reference_are_scored_over_the_ranks(config, tmp_path):
    older = config(steps=4, virtual_shards=8, max_staleness=1, loss__kl_coef=0.1)
    train(older, tmp_path / "alone")
    _run(2, older, tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


def test_what_is_saved_of_older_weights_is_the_decoder_that_scored(decoder):
    """A mismatch saves this decoder (runs/run.py), whether or not its scores are spread over ranks."""
    scorer = frozen(decoder, 1, 1, 4)
    assert RankedScorer(scorer, ALONE).decoder is scorer.decoder is decoder


@pytest.mark.full
def test_a_mismatch_is_saved_whole_before_any_rank_ends(brief, tmp_path):
    """torchrun ends the other ranks as soon as one has ended, and rank 0 writes slowly here."""
    (tmp_path / "planted.py").write_text(
        "import time\n"
        "import numpy as np\n"
        "from zerokl.engine.runs import run\n"
        "from zerokl.engine.train import step\n"
        "collect, write = step.collect, run.write_checkpoint\n"
        "def collected(*args):\n"
        "    batch = collect(*args)\n"
        "    logprobs = batch.rollouts[0].logprobs\n"
        "    logprobs[0] = np.nextafter(logprobs[0], np.float32(-9))\n"
        "    return batch\n"
        "def slowly(*args, **kwargs):\n"
        "    time.sleep(4)\n"
        "    write(*args, **kwargs)\n"
        "step.collect, run.write_checkpoint = collected, slowly\n"
        "def plain(r, A, logp, low, high):\n"  # a surrogate is imported by every rank
        "    return r * A, r * A\n"
    )
    config = brief.model_copy(update={"loss": brief.loss.model_copy(update={"surrogate": "planted:plain"})})
    (tmp_path / "config.toml").write_text(to_toml(config))
    process = _launch(2, ["config.toml", "--run_dir", str(tmp_path / "run")], tmp_path)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert "step 0, prompt 0, sample 0, position 0" in " ".join(output.split()), output
    saved = {p.name for p in (tmp_path / "run" / "mismatch").iterdir()}
    assert saved >= {"mismatch.json", "model.safetensors"}, output


@pytest.mark.slow
def test_eight_ranks_give_the_same_ledger(plain, alone, tmp_path):
    _run(8, plain, tmp_path / "run", "--workers", "1")
    _same(tmp_path / "run", alone)


@pytest.mark.full
def test_a_rank_that_dies_ends_the_job_and_another_number_goes_on(brief, tmp_path):
    """Rank 0 is killed in the fourth step, when the ledger holds a head and three steps."""
    path = tmp_path / "run"
    deadly = brief.model_copy(update={"loss": brief.loss.model_copy(update={"surrogate": "dies:plain"})})
    (tmp_path / "config.toml").write_text(to_toml(deadly))
    (tmp_path / "dies.py").write_text(
        "import os, signal\n"
        "def plain(r, A, logp, low, high):\n"
        f"    ledger, again = {str(path / 'ledger.jsonl')!r}, {str(tmp_path / 'again')!r}\n"
        "    steps = len(open(ledger).readlines()) if os.path.exists(ledger) else 0\n"
        "    if steps > 3 and os.environ.get('RANK') == '0' and not os.path.exists(again):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return r * A, r * A\n"
    )
    process = _launch(2, ["config.toml", "--run_dir", str(path)], tmp_path)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert re.search(r"exitcode\s*: -9", output), output
    assert re.search(r"rank\s*: 0", output), output
    (tmp_path / "again").touch()
    process = _launch(1, ["--resume", str(path)], tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "going on at step 2 of 4" in output
    weights = json.loads((path / "summary.json").read_text())["weights"]
    assert weights == train(brief, tmp_path / "alone").weights


def test_one_rank_has_no_mesh_and_loads_nothing_for_one():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from zerokl.engine.train.parallel.process_group import join_ranks\n"
        "with join_ranks() as ranks:\n"
        "    assert (ranks.mesh, ranks.rank, ranks.size, ranks.first) == (None, 0, 1, True)\n"
        "    assert not torch.distributed.is_initialized()\n"
        "print([name for name in set(sys.modules) - before if name.startswith('torch.distributed')])\n"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


_ONE_GPU = """
import runpy
import torch
def refuse(*args):
    raise AssertionError(f"a GPU is touched: {args}")
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
torch.cuda.set_device = torch.cuda.current_device = torch.cuda.init = torch.cuda._lazy_init = refuse
runpy.run_module("zerokl", run_name="__main__", alter_sys=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", ""),
        # Controls: the GPU is asked for, and torch says that there is one.
        (
            "cuda",
            "ranks: rank 1 of this machine has no GPU, as it has 1; start at most 1 ranks on it, or set",
        ),
        ("auto", "ranks: rank 1 of this machine has no GPU"),
    ],
)
def test_more_ranks_than_gpus_run_on_the_cpu(brief, tmp_path, device, message):
    (tmp_path / "config.toml").write_text(to_toml(brief.model_copy(update={"device": device, "steps": 1})))
    (tmp_path / "pretended.py").write_text(_ONE_GPU)
    words = ("train", "config.toml", "--run_dir", str(tmp_path / "run"))
    failed, output = ended_ranks(2, ["pretended.py", *words], tmp_path)
    assert (failed == 0) == (device == "cpu"), output
    assert message in " ".join(output.split()), output


BAD = [
    pytest.param(3, [], "ranks (3) must be a power of two", marks=pytest.mark.full),
    (2, ["--task.reward", "toy:broken"], "raised RuntimeError"),
]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "words", "message"), BAD)
def test_bad_input_is_said_by_rank(brief, tmp_path, ranks, words, message):
    (tmp_path / "config.toml").write_text(to_toml(brief))
    train_words = ["-m", "zerokl", "train", "config.toml", "--run_dir", str(tmp_path / "run"), *words]
    failed, output = ended_ranks(ranks, train_words, tmp_path)
    assert failed
    assert re.search(rf"^zerokl: rank \d: .*{re.escape(message)}", output, re.MULTILINE), output
    assert "zerokl/engine" not in output, "no traceback of ours"
