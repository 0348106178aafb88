"""Where a step's time goes, its rates, and the trace of a step: none of it decides a bit."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM
from zerokl.cli import main
from zerokl.engine.rollout import stopwatch
from zerokl.engine.rollout.stopwatch import Stopwatch
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train import performance
from zerokl.engine.train.losses.advantage import of_tokens
from zerokl.engine.train.performance import PEAK_TFLOPS, peak_flops, training_flops
from zerokl.engine.train.shard import Shard
from zerokl.model.config import ModelConfig

from tests.engine.runs.exact_runs import forget_end
from tests.helpers import property_settings

STATIONS = ("prompts", "decode", "reward", "score", "forward_backward", "optimizer", "sync")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    return path, train(config(checkpoint__every=1), path)


def test_the_peak_of_a_process_leaves_out_what_its_parent_held():
    child = """if True:
        from zerokl.engine.train.performance import peak_memory_bytes, torch
        print(peak_memory_bytes(torch.device("cpu")))"""
    held = torch.ones(1 << 29)  # 2 GiB, which getrusage would count for the child too
    printed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert 50 << 20 < float(printed) < held.nbytes


def test_the_stations_of_a_step_lie_within_it(run, read_jsonl):
    shares = []
    for m in read_jsonl(run[0] / "metrics.jsonl"):
        seconds = {name: m[f"time/{name}_s"] for name in (*STATIONS, "ledger")}
        assert all(s > 0 for s in seconds.values()), seconds
        sampling = seconds["prompts"] + seconds["decode"] + seconds["reward"]
        training = sum(seconds[name] for name in (*STATIONS[3:], "ledger"))
        assert sampling <= m["time/sample_s"]
        assert training <= m["time/train_s"]
        step_s = m["time/sample_s"] + m["time/train_s"]
        shares.append((sampling + training) / step_s)
        assert m["perf/tokens_per_s"] == m["tokens"] / step_s
        assert m["perf/peak_memory_bytes"] > 50 << 20  # torch alone takes more
        assert "perf/mfu" not in m, "nobody knows the peak rate of a CPU"
    assert max(shares) > 0.8, "the stations leave little out"


def test_the_display_shows_tokens_a_second(config, tmp_path, capsys, read_jsonl):
    train(config(steps=1), tmp_path / "run")
    (m,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert f"  {m['perf/tokens_per_s']:,.0f} tokens/s" in capsys.readouterr().out


def test_a_full_cache_shows_in_the_samples_at_once(config, tmp_path, read_jsonl):
    at_once = []
    for name, values in {"whole": {}, "small": {"native__max_concurrency": 2}}.items():
        train(config(steps=1, **values), tmp_path / name)
        at_once.append(read_jsonl(tmp_path / name / "metrics.jsonl")[0]["perf/samples_at_once"])
    whole = config()
    assert at_once == [min(whole.native.max_concurrency, whole.prompts * whole.num_generations), 2]


def test_guessed_tokens_are_counted(config, tmp_path, read_jsonl):
    """A model of random weights repeats itself at a low temperature."""
    steps = {}
    for k in (0, 3):
        train(config(steps=2, native__speculate=k, sampling__temperature=0.02), tmp_path / str(k))
        steps[k] = read_jsonl(tmp_path / str(k) / "metrics.jsonl")
    assert not any(name in m for m in steps[0] for name in ("perf/tokens_per_turn", "perf/guesses_drawn"))
    assert all(1 < m["perf/tokens_per_turn"] <= 4 for m in steps[3])
    assert all(0 < m["perf/guesses_drawn"] <= 1 for m in steps[3])


def test_a_separate_sampler_is_measured_too(config, tmp_path, read_jsonl):
    train(config(max_staleness=1, evaluation__every=1), tmp_path / "run")
    for m in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert m["perf/samples_at_once"] == 9
        assert 0 < m["time/decode_s"] < m["time/prompts_s"] + m["time/decode_s"] <= m["time/sample_s"]


def test_a_station_adds_up_and_an_exception_leaves_it_out():
    watch = Stopwatch(CPU)
    for seconds in (0.01, 0.02):
        with watch.station("a"):
            time.sleep(seconds)
    with pytest.raises(ZeroDivisionError), watch.station("b"):
        _ = 1 / 0
    assert list(watch.seconds()) == ["a"]
    assert 0.03 <= watch.seconds()["a"] < 1
    with watch.start()("c"):
        pass
    assert list(watch.seconds()) == ["c"]


class _Event:
    """A CUDA event of a GPU that has done the first `done` events of its queue, a millisecond each."""

    queue: list["_Event"]
    done = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self):
        self.place = len(self.queue)
        self.queue.append(self)

    def query(self):
        return self.place < _Event.done

    def elapsed_time(self, end):
        assert end.query(), "the time of an event that the GPU has not reached is an error"
        return float(end.place - self.place)

    def synchronize(self):
        raise AssertionError("a stopwatch must not wait for the GPU")


def test_on_a_gpu_nothing_waits_and_what_is_not_done_is_left_out(monkeypatch):
    _Event.queue, _Event.done = [], 0
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", _Event.synchronize)
    monkeypatch.setattr(stopwatch.time, "perf_counter", _Event.synchronize)  # the host's clock is not read
    watch = Stopwatch(torch.device("cuda"))
    for name in ("a", "b", "a", "c"):
        with watch.station(name):
            pass
    for _Event.done, expected in (
        (0, {}),
        (4, {"b": 1e-3}),
        (6, {"a": 2e-3, "b": 1e-3}),
        (8, {"a": 2e-3, "b": 1e-3, "c": 1e-3}),
    ):
        assert watch.seconds() == expected


def _config(head_dim: int, layers: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        architectures=["Qwen3ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


@property_settings(15)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([16, 32]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_the_operations_are_those_that_torch_counts(prompt, completion, head_dim, layers, tied, backward):
    """One sequence through transformers' model, of which torch counts every product.

    Two products in ours are smaller: attention leaves hidden pairs out. And no gradient goes to the ids, so
    torch has nothing to leave out: the embedding is no product.
    """
    hf = _config(head_dim, layers, tied)
    model, T = Qwen3ForCausalLM(hf), prompt + completion - 1
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(T).unsqueeze(0), logits_to_keep=completion).logits
        if backward:
            logits.sum().backward()
    flops = training_flops(
        ModelConfig.from_dict(hf.to_dict()), [(prompt, completion, completion, True, backward)]
    )
    hidden_pairs = T * T - T * (T + 1) // 2
    hidden = (3 if backward else 1) * 4 * layers * 6 * head_dim * hidden_pairs
    angles = counter.get_total_flops() - flops - hidden  # of rope: positions times frequencies
    assert angles in (0, 2 * T * head_dim // 2)


def test_a_prompt_counts_once_and_only_what_has_a_gradient_counts_thrice():
    c = ModelConfig.from_dict(_config(16, 2, True).to_dict())
    forward = training_flops(c, [(7, 5, 5, True, False)])
    assert training_flops(c, [(7, 5, 5, True, True)]) == 3 * forward
    again = training_flops(c, [(7, 5, 5, False, False)])
    assert training_flops(c, [(7, 5, 5, True, False), (7, 5, 5, False, False)]) == forward + again
    unseen = training_flops(c, [(7, 5, 2, True, False)])  # three tokens were not drawn, and have no logits
    assert forward - unseen == 2 * 3 * c.vocab_size * c.hidden_size
    assert forward - again == training_flops(c, [(6, 1, 1, True, False)]) - 2 * 96 * 48


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA GH200 480GB", 989.4e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA B200", 2250e12, None),
        ("NVIDIA GB200", 2500e12, None),
        ("NVIDIA H20", None, None),
        ("CPU", None, None),
    ],
)
def test_the_peak_rate_is_that_of_the_device(name, bf16, fp32):
    assert peak_flops(name, torch.bfloat16) == peak_flops(name, torch.float16) == bf16
    assert peak_flops(name, torch.float32) == fp32


def test_every_row_of_the_table_is_reached():
    for name, (tflops, _) in PEAK_TFLOPS.items():
        assert peak_flops(f"NVIDIA {name} 80GB", torch.bfloat16) == 1e12 * tflops


def test_mfu_is_the_trainers_work_over_its_time_and_the_peak(monkeypatch, config):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    model = ModelConfig.from_dict(_config(16, 2, True).to_dict())
    policy = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=model)
    rollouts = [
        Rollout.of_one_turn(0, i, (1,) * 4, (2,) * c, np.zeros(c, np.float32), "length", 0)
        for i, c in enumerate((3, 6))
    ]
    shard = Shard(rollouts, of_tokens([0.5, 0.0], (3, 6)), np.ones(2))
    times = {"time/sample_s": 1.0, "time/train_s": 2.0, "time/forward_backward_s": 0.5}
    sampler = SimpleNamespace(samples_at_once=None)
    for overrides, gradient in (({}, False), ({"loss__kl_coef": 0.1}, True)):
        settings = config(updates_per_rollout=2, **overrides)
        state = SimpleNamespace(
            policy=policy,
            config=settings,
            ranks=SimpleNamespace(size=4),
            sampler=sampler,
            ahead=None,
            stopwatch=Stopwatch(torch.device("cpu")),
        )
        metrics = performance.performance(state, shard, times)
        flops = 2 * training_flops(model, [(4, 3, 3, True, True), (4, 6, 6, False, gradient)])
        assert metrics == {
            "perf/tokens_per_s": 3.0,
            "perf/mfu": flops / (0.5 * 989.4e12 * 4),
            "perf/peak_memory_bytes": 5.0,
        }
        del times["time/forward_backward_s"]  # the GPU had not ended
        assert "perf/mfu" not in performance.performance(state, shard, times)
        times["time/forward_backward_s"] = 0.5


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_profiled_run_has_a_trace_and_the_same_bits(run, config, tmp_path, capsys, workers):
    summary = train(config(checkpoint__every=1, workers=workers), tmp_path / "run", profile=1)
    assert (summary.fingerprint, summary.weights) == (run[1].fingerprint, run[1].weights)
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "step-000001.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    for station in STATIONS:
        assert f"time/{station}_s" in names
    assert names.count("time/optimizer_s") == 1, "one step, not several"
    assert any(name.startswith("aten::") for name in names)
    output = " ".join(capsys.readouterr().out.split())
    assert str(trace) in output
    assert ("of the first of 2 workers" in output) == (workers == 2)


def test_a_resumed_run_is_profiled_and_keeps_its_traces(run, config, tmp_path):
    path = tmp_path / "run"
    train(config(checkpoint__every=1), path, profile=2)
    forget_end(path)
    assert resume(path, profile=2).fingerprint == run[1].fingerprint
    assert sorted(p.name for p in (path / "profile").iterdir()) == ["step-000002-2.json", "step-000002.json"]


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_that_is_not_taken_is_refused_before_anything_is_written(config, tmp_path, step):
    message = rf"^profile \({step}\) must be a step that this run takes, from 0 to 2"
    with pytest.raises(ValueError, match=message):
        train(config(), tmp_path / "run", profile=step)
    assert not (tmp_path / "run").exists()


def test_the_command_line_names_the_step(monkeypatch, capsys, tmp_path):
    words = ["train", "--preset", "demo", "--run_dir", str(tmp_path / "run"), "--profile"]
    assert main([*words, "500"]) == 2
    assert "profile (500) must be a step that this run takes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
