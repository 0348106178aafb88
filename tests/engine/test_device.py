"""The `device` key: what a machine without a GPU answers. And what benchmarks/device.sh needs of one with a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from zerokl.engine import run, samplers
from zerokl.engine.audit import audit
from zerokl.engine.audit.audit import AuditConfig
from zerokl.engine.config import Config, VllmConfig, load_config
from zerokl.engine.run import _device, train
from zerokl.kernels import backend

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@no_gpu
def test_auto_is_the_cpu_and_cuda_is_refused_before_anything_is_written(tmp_path):
    assert _device(Config()).type == "cpu"
    with pytest.raises(ValueError, match=r'^device \("cuda"\): torch finds no CUDA GPU here; set device = "cpu" or "auto"$'):
        train(Config(device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"config: device \('tpu'\)"):
        load_config(None, None, {"device": "tpu"})
    with pytest.raises(ValueError, match=r'^device \("tpu"\) must be auto, cpu or cuda$'):
        backend.find_device("tpu")


def test_an_audit_computes_where_vllm_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(audit, "require_vllm", lambda: "0.32.0")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for cpu_build in (True, False):
        monkeypatch.setattr(audit, "is_cpu_build", lambda cpu_build=cpu_build: cpu_build)
        assert audit._device(AuditConfig("model", "hf")) == gpu
        assert audit._device(AuditConfig("model", "hf", device="cpu")) == cpu
        assert audit._device(AuditConfig("model", "vllm-zerokl")) == (cpu if cpu_build else gpu)
        with pytest.raises(ValueError, match="computes on a CPU; set --device cpu" if cpu_build else "needs a GPU, and audits there"):
            audit._device(AuditConfig("model", "vllm", device="cuda" if cpu_build else "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="the vLLM installed here needs a GPU, and torch finds none"):
        audit._device(AuditConfig("model", "vllm"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="on a GPU vllm and vllm-zerokl would be two engines in one process"):
        audit._device(AuditConfig("model", "vllm-zerokl", "vllm"))


def test_a_gpu_has_one_worker_and_a_sampler_that_computes_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    assert _device(Config()) == torch.device("cuda", 0)
    assert _device(Config(device="cpu", workers=2)) == torch.device("cpu")
    for cpu_build, device in ((True, torch.device("cpu")), (False, torch.device("cuda", 0))):
        monkeypatch.setattr(run, "is_cpu_build", lambda cpu_build=cpu_build: cpu_build)
        monkeypatch.setattr(samplers, "is_cpu_build", lambda cpu_build=cpu_build: cpu_build)
        assert _device(Config(sampler="vllm")) == device
    with pytest.raises(ValueError, match=r"workers \(2\) must be 0 or 1 on a GPU"):
        _device(Config(workers=2))
    with pytest.raises(ValueError, match=r"vllm.multiprocess \(true\): on a GPU"):
        _device(Config(device="cuda", sampler="vllm", vllm=VllmConfig(multiprocess=True)))
    monkeypatch.setattr(samplers, "is_cpu_build", lambda: True)
    with pytest.raises(ValueError, match=r'sampler \("vllm"\): the vLLM installed here computes on CPUs only; set device = "cpu"'):
        _device(Config(device="cuda", sampler="vllm"))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a GPU needs Triton; pip install triton"):
        _device(Config())


def test_the_benchmarks_for_a_gpu_need_torch_triton_and_transformers_only(tmp_path):
    """Every section, on the CPU, in a process that finds none of our other packages."""
    others = ("pydantic", "tyro", "rich", "math_verify", "matplotlib", "tensorboard")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({others}))\n")
    root = Path(run.__file__).parents[1]
    (tmp_path / "zerokl").symlink_to(root)
    command = [sys.executable, "-P", str(root / "benchmarks" / "device.py"), "--dry-run"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "unequal bits in 0 rows"
    assert "toy decoding, 4 samples" in done.stdout
