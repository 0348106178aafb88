"""The `device` key: where a run computes, and what is refused."""

import pytest
import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.runs import setup
from zerokl.engine.runs.run import train
from zerokl.engine.runs.setup import run_device
from zerokl.kernels import backend

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@no_gpu
def test_auto_is_the_cpu_and_cuda_is_refused_before_anything_is_written(tmp_path):
    assert run_device(Config()).type == "cpu"
    message = r'^device \("cuda"\): torch finds no CUDA GPU here; set device = "cpu" or "auto"$'
    with pytest.raises(ValueError, match=message):
        train(Config(device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"config: device \('tpu'\)"):
        load_config(None, None, {"device": "tpu"})
    with pytest.raises(ValueError, match=r'^device \("tpu"\) must be auto, cpu or cuda$'):
        backend.find_device("tpu")


def test_a_gpu_has_one_worker_and_a_sampler_that_computes_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())

    def pretend_vllm(version: str) -> None:
        monkeypatch.setattr(setup, "installed_vllm", lambda: version)
        monkeypatch.setattr(setup, "is_cpu_build", lambda: version.endswith("+cpu"))

    assert run_device(Config()) == torch.device("cuda", 0)
    assert run_device(Config(device="cpu", workers=2)) == torch.device("cpu")
    for cpu_build, device in ((True, torch.device("cpu")), (False, torch.device("cuda", 0))):
        pretend_vllm("0.32.0+cpu" if cpu_build else "0.32.0")
        assert run_device(Config(sampler="vllm-zerokl")) == device
    with pytest.raises(ValueError, match=r"workers \(2\) must be 0 or 1 on a GPU"):
        run_device(Config(workers=2))
    with pytest.raises(ValueError, match=r"vllm.multiprocess \(true\): on a GPU"):
        run_device(Config(device="cuda", sampler="vllm-zerokl", vllm=VllmConfig(multiprocess=True)))
    pretend_vllm("0.32.0+cpu")
    message = r'sampler \("vllm-zerokl"\): the vLLM installed here computes on CPUs only; set device = "cpu"'
    with pytest.raises(ValueError, match=message):
        run_device(Config(device="cuda", sampler="vllm-zerokl"))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a GPU needs Triton; pip install triton"):
        run_device(Config())
