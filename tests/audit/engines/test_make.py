"""Where the engines of an audit compute, and what is refused."""

import pytest
import torch
from zerokl.audit.engines import make as engines
from zerokl.kernels import backend

from tests.audit.settings import audit_config


def test_an_audit_computes_where_vllm_does(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engines, "require_vllm", lambda: "0.32.0")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for cpu_build in (True, False):
        monkeypatch.setattr(engines, "is_cpu_build", lambda cpu_build=cpu_build: cpu_build)
        assert engines.device_of(audit_config("model", "hf")) == gpu
        assert engines.device_of(audit_config("model", "hf", device="cpu")) == cpu
        assert engines.device_of(audit_config("model", "vllm-zerokl")) == (cpu if cpu_build else gpu)
        message = "computes on a CPU; set --device cpu" if cpu_build else "needs a GPU, and audits there"
        with pytest.raises(ValueError, match=message):
            engines.device_of(audit_config("model", "vllm", device="cuda" if cpu_build else "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="the vLLM installed here needs a GPU, and torch finds none"):
        engines.device_of(audit_config("model", "vllm"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="on a GPU vllm and vllm-zerokl would be two engines in one process"):
        engines.device_of(audit_config("model", "vllm-zerokl", "vllm"))
