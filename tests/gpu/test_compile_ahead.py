"""The launches of a step that has no memory: every family that a GPU computes, and what a run may set."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from zerokl.benchmarks.device.families import DENSE, MIXTURES, family_config
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config, ParallelConfig
from zerokl.engine.runs import compile_ahead
from zerokl.engine.runs.compile_ahead import launches_of_a_step
from zerokl.engine.runs.memory import PassSizes, RunShape
from zerokl.engine.runs.trained import model_layout
from zerokl.engine.train.parallel.process_group import ALONE
from zerokl.kernels.launch import Launch, kind_of
from zerokl.model.adapters import AdapterLayout
from zerokl.model.scoring import ScoringInputs

from tests.gpu.fake_cuda import CUDA
from tests.gpu.without_triton import kernels_without_triton

SHAPE = SimpleNamespace(config=Config())
SETTINGS = {
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "chunks": {"precision.attention": "chunked-512"},
    "guesses": {"native.speculate": "3"},
    "critic": {"loss.preset": "ppo"},
    "recompute": {"recompute": "layer"},
    "adapters": {"lora.rank": "4"},
    "adapters beside": {"lora.rank": "4", "lora.merge": "false"},
    "filter": {"sampling.top_p": "0.9", "sampling.top_k": "20"},
}


SIZES = PassSizes(4, 1, 1)


def step(family: str, sizes: PassSizes = SIZES, **settings: str) -> list[Launch]:
    small = {"prompts": "2", "num_generations": "2", "virtual_shards": "1", "sampling.max_tokens": "8"}
    config = load_config(None, "demo", {"dtype": "bfloat16", **small, **settings})
    layout = model_layout(config, family_config(family, is_small=True))
    lora = config.lora.shape
    shape = RunShape(config, layout, prompt_tokens=9, adapters=AdapterLayout(layout, lora) if lora else None)
    with kernels_without_triton():
        return launches_of_a_step(shape, sizes, "sm_90")


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_the_step_of_every_family_is_gone_through_without_memory(family):
    names = {launch.kernel.__name__ for launch in step(family)}
    assert {"_embedding_bwd", "_logprob_bwd", "_tile_sums"} <= names  # trained, and drawn from


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_changes_what_is_compiled_and_no_kind_stands_twice(settings):
    plain, launches = (
        [(launch.kernel.__name__, *kind_of(*launch)[1:]) for launch in step("qwen3", **x)]
        for x in ({}, settings)
    )
    assert len(launches) == len(set(launches))
    # Guesses and recomputed layers make launches of the same kinds.
    assert (set(launches) == set(plain)) == (settings.keys() <= {"native.speculate", "recompute"})


def test_a_large_step_is_gone_through_in_few_micro_batches(monkeypatch):
    """And its launches are those of a step of as many shards in flight."""
    passes, forward = [], ScoringInputs.forward

    def counted(self, *arguments, **named):
        passes.append(len(self._ids))
        return forward(self, *arguments, **named)

    monkeypatch.setattr(ScoringInputs, "forward", counted)
    keys = []
    for prompts in ("16", "256"):
        passes.clear()
        launches = step("qwen3", PassSizes(4, 2, 2), prompts=prompts, virtual_shards="2")
        keys.append({(launch.kernel.__name__, *kind_of(*launch)[1:]) for launch in launches})
        assert 0 < len(passes) <= 8
    assert keys[0] == keys[1]


def test_a_sampler_that_loads_with_another_default_dtype_is_harmless(monkeypatch):
    """vLLM and transformers set torch's default dtype, which all threads share, while they load a model."""
    compiled = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compile_ahead, "compile_launches", lambda launches, *_: compiled.extend(launches))
    monkeypatch.setattr(compile_ahead, "launches_of_a_step", lambda *_: [torch.get_default_dtype()])
    with compile_ahead.compiled_ahead(SHAPE, None, CUDA, ALONE):
        torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    assert compiled == [torch.float32]


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_share_what_is_compiled_and_a_failure_is_no_secret(fails, monkeypatch):
    compiled: list[list[Launch]] = []

    def compile_launches(launches: list[Launch], target: str, threads: int) -> None:
        compiled.append(launches)
        if fails:
            raise RuntimeError(f"no ptxas for {target}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compile_ahead, "launches_of_a_step", lambda shape, sizes, target: list(range(7)))
    monkeypatch.setattr(compile_ahead, "compile_launches", compile_launches)
    for rank in range(2):
        ended = pytest.raises(RuntimeError, match="no ptxas for sm_90") if fails else nullcontext()
        with ended, compile_ahead.compiled_ahead(SHAPE, None, CUDA, SimpleNamespace(rank=rank, size=2)):
            pass
    assert compiled == [[0, 2, 4, 6], [1, 3, 5]]


def test_a_cpu_and_fsdp_compile_nothing_ahead(monkeypatch):
    monkeypatch.setattr(compile_ahead, "launches_of_a_step", lambda *_: pytest.fail("compiled"))
    sharded = SimpleNamespace(config=Config(parallel=ParallelConfig(engine="fsdp")))
    for shape, device in ((SHAPE, torch.device("cpu")), (sharded, CUDA)):
        with compile_ahead.compiled_ahead(shape, None, device, ALONE):
            pass
