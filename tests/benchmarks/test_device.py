"""benchmarks/device.sh runs here with toy sizes, so that it is not broken on the day a GPU is there.

What needs vLLM or TRL is tested in their environments (tests/vllm/test_device.py, tests/trl/test_device.py).
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from zerokl.benchmarks.device import __main__ as device
from zerokl.benchmarks.device import exact, families, ranks, report, step
from zerokl.benchmarks.device.processes import rows_of
from zerokl.benchmarks.device.runs import Run
from zerokl.benchmarks.letters import Letters, characters
from zerokl.benchmarks.machine import Machine
from zerokl.engine.runs.init import preset_config
from zerokl.model.families import MODEL_TYPES
from zerokl.verify.run_environment import PACKAGE_ROOT

DEVICE = PACKAGE_ROOT / "benchmarks" / "device.sh"
SMALL = ("--device", "cpu", "--small")
# What device.sh does not ask for.
MISSING = ("math_verify", "tensorboard", "tomli_w")


def run_device(*words: str, path: Path | None = None) -> subprocess.CompletedProcess:
    """Run device.sh with this Python; `path` goes on its PYTHONPATH."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(path or "")}
    return subprocess.run([DEVICE, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        pytest.param("exact", ["law fp32: alone", "stale rollouts bf16: "], marks=pytest.mark.full),
        pytest.param("kernels", ["toy linear, 64 rows", "toy attention backward"], marks=pytest.mark.full),
        pytest.param("step", ["whole step of 2 x 4 x 8 tokens"], marks=pytest.mark.full),
        pytest.param("decode", ["decoding 16 x 8 tokens after 8, zerokl"], marks=pytest.mark.full),
        pytest.param("decode-vllm", ["decoding, vLLM as it comes: not"], marks=pytest.mark.full),
        pytest.param("vllm", ["vLLM's kernels: not compared"], marks=pytest.mark.full),
        pytest.param("vllm-runs", ["runs in which vLLM samples: not compared"], marks=pytest.mark.full),
        pytest.param(
            "models", ["experts float16, sampler native: ", "adapters float32"], marks=pytest.mark.full
        ),
        pytest.param(
            "families",
            ["law gemma2 float16: token by token", "glm4_moe bfloat16: ", "qwen3_next: not compared"],
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "long", ["a step of 2 x 48", "2 x 2 samples of 8 tokens after 70"], marks=pytest.mark.full
        ),
        pytest.param("ranks", ["ranks: not compared"], marks=pytest.mark.full),
    ],
)
def test_every_part_runs_in_a_python_with_few_packages(tmp_path, part, rows):
    """All sections run, in a process without the packages that device.sh does not ask for."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING}))\n")
    process = run_device(part, *SMALL, path=tmp_path)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    assert process.stdout.splitlines()[-2:] == [
        f"{part}: unequal bits in 0 rows",
        f"{part}: no result in 0 rows",
    ]
    for row in rows:
        assert re.search(rf"^{re.escape(row)}", process.stdout, re.M), row
    if part == "exact":
        assert "kill and resume: not compared (tensorboard, tomli_w is missing)" in process.stdout


def test_every_family_has_two_layers_at_published_widths_or_is_named():
    """Each with both kinds of its layers, and a window that the sequences cross."""
    names = [*families.DENSE, *families.MIXTURES, *families.NOT_ON_A_GPU]
    assert sorted(names) == sorted(MODEL_TYPES)
    for name in {**families.DENSE, **families.MIXTURES}:
        for is_small in (True, False):
            config = families.family_config(name, is_small)
            assert len(config.blocks) == 2
            windows = [row.window for rows in config.layer_operations for row in rows if row.window]
            assert len(windows) == (name in ("gemma2", "gemma3_text", "gpt_oss", "olmo3"))
            assert max(windows, default=0) < 48
    for name in families.NOT_ON_A_GPU:
        with pytest.raises(ValueError, match=r'^device \("cuda"\): '):
            preset_config(name, 128).refuse_on_triton()


@pytest.mark.full
def test_one_family_is_exact_in_three_dtypes():
    rows = list(families._runs(Machine("cpu", small=True), "gemma2"))
    assert len(rows) == 3 * 8
    assert {row["what"]: row["unequal"] for row in rows if row["unequal"]} == {}


@pytest.mark.full
def test_a_run_is_killed_and_resumed():
    (row,) = exact.kill_and_resume(Machine("cpu", small=True), torch.float32)
    assert re.fullmatch(r"kill -9 after [2-6] of 6 steps and resume fp32", row["what"])
    assert row["unequal"] == 0


@pytest.mark.proof
def test_two_ranks_and_one_are_compared_with_one_process():
    rows = list(ranks.bf16(Machine("cpu", small=True)))
    forms = ["replicated", "fsdp"] * 2 + ["tensor", "context", "fsdp, tensor"]
    assert [row["what"] for row in rows] == [
        f"{form} bf16, ranks of gloo: {n}, beside one process"
        for form, n in zip(forms, (2, 2, 1, 1, 2, 2, 2), strict=True)
    ]
    assert [row["unequal"] for row in rows] == [0] * 7


def test_two_ranks_need_two_gpus_and_another_ledger_is_found(monkeypatch):
    """The runs are not started here."""
    runs = {0: "one", 1: "one", 2: "other"}
    monkeypatch.setattr(
        ranks, "_run", lambda m, words, folder, n: {"fingerprint": runs[n], "weights": "same"}
    )
    m = Machine("cpu", small=True)
    assert [row["unequal"] for row in ranks.bf16(m)] == [1, 1, 0, 0, 1, 1, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    m.on_gpu = True
    monkeypatch.setattr(ranks, "write_model", lambda *_: "model")
    rows = list(ranks.bf16(m))
    assert [row["what"] for row in rows[:2]] == [
        f"{engine} bf16, ranks of nccl: 2: not compared (GPUs: 1)" for engine in ("replicated", "fsdp")
    ]
    assert [row["unequal"] for row in rows[2:4]] == [0, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ranks, "_run", lambda *_: {"refused": "config: parallel.tensor (2)"})
    assert "not compared (config: parallel.tensor (2))" in list(ranks.bf16(m))[-1]["what"]


@pytest.mark.full
def test_the_split_of_a_step_is_there():
    rows = list(step.whole_step(Machine("cpu", small=True)))
    (ours,) = (row for row in rows if "zerokl, native sampler" in row["what"])
    assert ours["unequal"] == 0
    stations = ("prompts", "decode", "reward", "score", "forward_backward", "optimizer", "sync", "ledger")
    assert {f"{name}_s" for name in stations} <= ours.keys()
    assert ours["forward_backward_s"] < ours["train_s"] < ours["step_s"]


@pytest.mark.full
def test_what_is_not_a_part_is_refused():
    process = run_device("everything", *SMALL)
    assert process.returncode == 2
    assert "invalid choice: 'everything'" in process.stderr
    process = run_device("kernels", "--device", "cpu")
    assert process.returncode == 2
    assert "--device cpu needs --small" in process.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_nothing_is_measured():
    process = run_device("kernels")
    assert process.returncode == 2
    assert "torch finds no CUDA GPU here; --device cpu --small checks this code" in process.stderr


SECTIONS = """
import os

def differs(m):
    yield {"what": "one", "unequal": 3}
    yield {"what": "two", "unequal": 0}

def fails(m):
    yield {"what": "three", "ours_ms": 1.25}
    raise RuntimeError("two\\nlines")

def dies(m):
    yield {"what": "four"}
    os.abort()

def late(m):
    yield {"what": "five", "left": m.left_s() < 220, "kernels": os.environ["VLLM_BATCH_INVARIANT"]}

SECTIONS = (differs, fails, dies, late)
"""


@pytest.fixture
def planted(monkeypatch, tmp_path) -> None:
    """The part `exact` has these sections."""
    (tmp_path / "planted_sections.py").write_text(SECTIONS)
    monkeypatch.setitem(device.PARTS, "exact", "planted_sections")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sys, "argv", ["device", "exact", *SMALL])


@pytest.mark.full
def test_a_section_that_differs_turns_the_part_red_and_one_that_fails_is_named(planted, capsys):
    environment = dict(os.environ)
    assert device.main() == 1
    assert dict(os.environ) == environment, "the variables of vLLM's kernels are a section's"
    lines = capsys.readouterr().out.splitlines()
    assert any(re.search(r"^three +ours_ms 1\.25$", line) for line in lines)
    assert any(re.search(r"^five +left True  kernels 1$", line) for line in lines), "those after them run"
    assert lines[-2] == "exact: unequal bits in 1 rows: one"
    assert re.fullmatch(
        r"exact: no result in 2 rows: fails: ended with 1: lines; dies: ended with -6: .*", lines[-1]
    )


@pytest.mark.full
def test_what_fails_says_nothing_of_bits(planted, monkeypatch, tmp_path):
    (tmp_path / "planted_sections.py").write_text(SECTIONS.replace('"unequal": 3', '"unequal": 0'))
    assert device.main() == 3


def test_a_section_that_begins_too_late_is_named(planted, monkeypatch):
    monkeypatch.setattr(device, "LAST_START_S", -1.0)
    result = report.new_report("exact", torch.device("cpu"), measures=False)
    device._run_sections(Machine("cpu", small=True), "exact", result)
    assert (result.rows, result.left_out) == ([], ["differs", "fails", "dies", "late"])


def test_every_part_has_sections():
    for name in device.PARTS.values():
        sections = importlib.import_module(name).SECTIONS
        assert sections
        assert len({section.__name__ for section in sections}) == len(sections)


def _jobs(**codes: str) -> dict[str, list[str]]:
    return {name: [sys.executable, "-c", code] for name, code in codes.items()}


def test_processes_run_at_the_same_time_and_their_failures_are_rows():
    jobs = _jobs(
        slow="import time; time.sleep(1); print('{\"what\": 1}')",
        turns="import sys; print('turn {\"lines\": %d}' % len(sys.stdin.readlines()))",
        noise="print({'loss': 1.0}); print('{\"what\": 2}')",
        fails="print('{\"what\": 3}', flush=True); raise ValueError('broken')",
        silent="",
    )
    began = time.perf_counter()
    rows = list(rows_of(Machine("cpu", small=True), jobs, 60, turns=4))
    assert time.perf_counter() - began < 20
    assert rows == [
        {"what": 1},
        {"lines": 4},
        {"what": 2},
        {"what": 3},
        {"what": "fails: ended with 1: ValueError: broken", "failed": True},
        {"what": "silent: ended with 0: no output", "failed": True},
    ]


def test_a_process_without_time_is_ended_with_its_children(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (row,) = rows_of(Machine("cpu", small=True), _jobs(endless=code), 3)
    assert row == {"what": "endless: not compared further (no time left)"}
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the child still runs")


def test_a_child_process_has_not_the_variables_of_vllms_kernels(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("ZEROKL_KEPT", "1")
    code = "import json, os; print(json.dumps({'what': [os.environ.get(name) for name in NAMES]}))"
    code = code.replace("NAMES", "('VLLM_BATCH_INVARIANT', 'ZEROKL_KEPT')")
    (row,) = rows_of(Machine("cpu", small=True), _jobs(a=code), 60)
    assert row == {"what": [None, "1"]}


def _step(**metrics: float) -> dict[str, float]:
    exactly = {"tokens": 10, "mismatch/frac_equal": 1.0, "ref/frac_equal": 0.5, "staleness/frac_equal": 0.5}
    return exactly | {"staleness/versions": 0} | metrics


def _verdicts(rows) -> list[int]:
    return [row["unequal"] for row in rows]


def test_control_a_reference_or_old_weights_that_do_nothing_are_found():
    first, later = _step(**{"ref/frac_equal": 1.0}), _step()
    for steps, verdicts in (
        ([first, later, later], [0, 0, 0]),
        ([first | {"mismatch/frac_equal": 0.9}, later, later], [1, 0, 0]),
        ([later, later, later], [0, 5, 0]),
        ([first, first, first], [0, 0, 2]),
    ):
        assert _verdicts(exact._reference_rows("bf16", Run(steps, "", ""))) == verdicts
    stale = _step(**{"staleness/versions": 1})
    for steps, verdicts in (
        ([later, stale, later], [0, 0, 0]),
        ([later, later, later], [0, 1, 0]),
        ([later, stale | {"staleness/frac_equal": 1.0}, stale], [0, 0, 1]),
    ):
        assert _verdicts(exact._staleness_rows("bf16", Run(steps, "", ""))) == verdicts


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_the_folder_of_a_gpu(name, folder):
    assert report.gpu_folder(name) == folder


def test_a_run_has_a_file_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(report, "environment", lambda *_: {"gpu": "NVIDIA H100 80GB HBM3"})
    for suffix in ("", "-2", "-3"):
        result = report.new_report("exact", torch.device("cuda"), measures=True)
        result.rows.append({"what": "law", "unequal": 0})
        result.write(1.5)
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-\w{{7}}-exact{suffix}\.json", result.target.name)
        written = json.loads(result.target.read_text())
        assert (written["part"], written["seconds"], written["rows"]) == ("exact", 1.5, result.rows)
    assert len(list((tmp_path / "h100").iterdir())) == 3


# The results of experiments lie beside the history: ablations (benchmarks/experiment.py), a gradient's bias
# (benchmarks/real/gradient.py).
EXPERIMENTS = {"real_gap", "real_gap_again", "real_gradient"}
HISTORY = sorted(
    p for p in report.RESULTS.glob("*/*.json") if p.parent.name != "cpu" and p.stem not in EXPERIMENTS
)


@pytest.mark.parametrize("path", HISTORY, ids=lambda path: path.stem)
def test_the_history_says_what_ran_and_no_bit_is_unequal(path):
    run = json.loads(path.read_text())
    date, commit = run["date"], run["commit"][:7]
    assert re.fullmatch(rf"{date}-{commit}-(all|{'|'.join(device.PARTS)})(-\d+)?", path.stem)
    assert path.parent.name == report.gpu_folder(run["environment"]["gpu"])
    assert {"torch", "triton", "driver", "python"} <= run["environment"].keys()
    assert run["rows"]
    assert [row["what"] for row in run["rows"] if row.get("unequal")] == []


def test_the_history_begins_with_the_first_run():
    assert HISTORY[0].name == "2026-11-22-cabfede-all.json"


def test_letters_earn_different_rewards():
    task = Letters(prompts=3, length=20)
    problems = task.problems("train")
    assert len({problem.prompt for problem in problems}) == 3
    assert {len(problem.prompt) for problem in problems} == {20}
    assert [task.reward(problems[0], text) for text in ("bd", "ab", "ac", "")] == [1.0, 0.5, 0.0, 0.0]
    alphabet = characters(151_933)
    assert len(set(alphabet)) == 151_933
    assert set(problems[0].prompt) <= set(characters(125))
    assert not any(0xD800 <= ord(c) < 0xE000 for c in alphabet)
