"""Memory beside the device: the same bits with it and without, the predicted bytes, and what is refused."""

import os
import re
import subprocess
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.training_sections import MemoryConfig
from zerokl.engine.runs.memory import PassSizes, RunShape, fit, fit_into, footprint
from zerokl.engine.runs.offloading import beside, placed, placed_into, told
from zerokl.engine.runs.run import train
from zerokl.engine.runs.setup import make_state
from zerokl.engine.runs.trained import adapter_layout, model_layout
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.train.step import train_step
from zerokl.kernels.order import ROW_TILE
from zerokl.model import offload
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.offload import Offload
from zerokl.model.weights import Layout

from tests.engine.runs.test_memory import GIB, LARGE, SMALL, kept_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    """So that the model of the tests comes in several."""
    monkeypatch.setattr(offload, "SLICE", 4096 * 3)


@pytest.fixture
def moved(monkeypatch) -> dict[str, int]:
    """Bytes that were asked for beside the device: for what a run keeps, and for inputs of layers."""
    counts = {"state": 0, "activations": 0}
    empty, pack = Offload.empty, Offload._pack

    def counted_empty(self, n, device, dtype=torch.float32):
        counts["state"] += n * dtype.itemsize * self.away
        return empty(self, n, device, dtype)

    def counted_pack(self, x):
        counts["activations"] += x.nbytes
        counts["state"] -= x.nbytes  # which `empty` has added
        return pack(self, x)

    monkeypatch.setattr(Offload, "empty", counted_empty)
    monkeypatch.setattr(Offload, "_pack", counted_pack)
    return counts


def away(config: Config, place: str) -> Config:
    return config.model_copy(update={"memory": MemoryConfig(offload=place)})


def one_step(config: Config, model: Path) -> None:
    task = load_task(config.task.name, config.task.options)
    with closing(make_state(config, model, task, Reward(task.reward))) as state:
        train_step(state)


RUNS = [
    {"dtype": "bfloat16"},
    {"dtype": "float32", "lora": LoraConfig(rank=3)},
    pytest.param({"dtype": "bfloat16", "lora": LoraConfig(rank=3)}, marks=pytest.mark.full),
    pytest.param(
        {"dtype": "float16", "precision__weights": "int8/row", "optimizer__weight_decay": 0.1},
        marks=pytest.mark.full,
    ),
    pytest.param({"dtype": "bfloat16", "loss__preset": "ppo"}, marks=pytest.mark.full),
    pytest.param({"dtype": "bfloat16", "optimizer__name": "muon"}, marks=pytest.mark.full),
    pytest.param({"dtype": "float32", "optimizer__moments": "int8"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("settings", RUNS, ids=str)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_run_has_the_bits_of_one_with_all_on_the_device(config, model, tmp_path, moved, settings, place):
    lora = settings.get("lora", LoraConfig())
    rest = {k: v for k, v in settings.items() if k != "lora"}
    cfg = config(model=model, recompute="layer", steps=2, **rest).model_copy(update={"lora": lora})
    here = train(away(cfg, "none"), tmp_path / "here")
    assert moved == {"state": 0, "activations": 0}
    there = train(away(cfg, place), tmp_path / "there")
    assert min(moved.values()) > 0
    assert (there.fingerprint, there.weights) == (here.fingerprint, here.weights)


def test_control_a_state_that_does_not_come_back_from_the_device_is_another_run(
    config, model, tmp_path, monkeypatch
):
    cfg = config(model=model, dtype="bfloat16", steps=2)
    here = train(cfg, tmp_path / "here")
    monkeypatch.setattr(Offload, "brought", lambda self, device, *x: nullcontext([y.clone() for y in x]))
    assert train(away(cfg, "host"), tmp_path / "there").weights != here.weights


@pytest.mark.parametrize(
    ("lora", "name"), [(0, "adamw"), (0, "muon"), (5, "adamw")], ids=["all", "muon", "lora"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_predicted_bytes_beside_the_device_are_those_of_a_run(config, model, moved, dtype, lora, name):
    cfg = away(config(dtype=dtype, model=model, recompute="layer", optimizer__name=name), "host")
    cfg = cfg.model_copy(update={"lora": LoraConfig(rank=lora)})
    layout = model_layout(cfg, ModelConfig.from_file(model))
    adapters, base = adapter_layout(cfg, layout, model)
    run = RunShape(cfg, layout, adapters=adapters, base=base)
    predicted = beside(run, fit(run, CPU))
    one_step(cfg, model)
    assert moved["state"] == predicted.optimizer + predicted.gradients + predicted.base


def test_of_a_recomputed_forward_nothing_but_what_lies_outside_of_layers_is_left(decoder, moved):
    def recomputing(place: str) -> Decoder:
        parts = decoder.config, decoder.flat.detach(), decoder.layout
        return Decoder(*parts, recompute=True, offload=Offload(place))

    here, there = (kept_bytes(recomputing(place), 97) for place in ("none", "host"))
    stream = decoder.dtype.itemsize * decoder.config.hidden_size
    rows = -(-(97 + 1) // ROW_TILE) * ROW_TILE  # a sample's rows begin with the prompt's last token
    inputs = 2 * decoder.config.layers - 1  # the first layer has one
    assert here - there == inputs * rows * stream
    # The prompt, which kept_bytes leaves out, is read up to the keys of its second layer.
    assert moved["activations"] == here - there + ROW_TILE * stream


def test_control_masters_that_stay_on_the_device_are_missed(config, model, moved, monkeypatch):
    cfg = away(config(dtype="bfloat16", model=model), "host")
    layout = model_layout(cfg, ModelConfig.from_file(model))
    run = RunShape(cfg, layout)
    monkeypatch.setattr(Offload, "copied", lambda self, x, device, dtype: x.to(device, dtype, copy=True))
    one_step(cfg, model)
    predicted = beside(run, fit(run, CPU))
    assert moved["state"] == predicted.optimizer + predicted.gradients - 4 * layout.trained_numel


def on_gpu(layout: Layout, tokens: int, **settings: object) -> RunShape:
    sampling, sizes = {"max_tokens": tokens}, {"prompts": 8, "num_generations": 8}
    return RunShape(Config(dtype="bfloat16", sampling=sampling, **sizes, **settings), layout, 1, 200)


def test_auto_takes_the_first_place_in_which_a_step_fits():
    run = on_gpu(LARGE, 8192, recompute="layer", native={"cache_bytes": 8 << 30})
    for gib, host, place in [(139, 64, "none"), (40, 64, "host"), (40, 16, "disk")]:
        chosen = placed_into(run, gib * GIB, host * GIB)
        assert chosen.config.memory.offload == place
        sizes = fit_into(chosen, gib * GIB)
        assert sum(footprint(chosen, sizes, gib * GIB)) <= 0.92 * gib * GIB
        if place != "none":
            assert re.search(rf"so 4\d\.\d GiB lie on the {place} \(memory", told(chosen, sizes))
    with pytest.raises(ValueError, match=r'set memory\.offload = "auto"'):
        fit_into(placed_into(replace(run, config=away(run.config, "none")), 1 << 60, 0), 20 * GIB)
    with pytest.raises(ValueError, match=r"^memory: a step needs about"):
        fit_into(placed_into(run, 8 * GIB, 64 * GIB), 8 * GIB)
    assert placed(run, CPU).config.memory.offload == "none"


def test_what_lies_beside_a_gpu_is_gone_from_it():
    run = on_gpu(SMALL, 4096, recompute="layer", micro_batch=1, shards_in_flight=1)
    sizes = PassSizes(1, 1, 8)
    there = replace(run, config=away(run.config, "host"))
    here, left, gone = (
        footprint(run, sizes, 79 * GIB),
        footprint(there, sizes, 79 * GIB),
        beside(there, sizes),
    )
    assert gone.optimizer == here.optimizer == 12 * SMALL.numel
    assert here.gradients - left.gradients == gone.gradients == 3 * 4 * SMALL.numel
    rows = 4096 + 200
    assert gone.activations == 28 * 2 * (1 << 24)  # for 1024 bf16 numbers a row
    assert here.activations - left.activations == rows * 25 * 2 * 1024 * 2


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_does_not_go_with_it_is_refused_in_one_line(config, place):
    with pytest.raises(
        ValueError, match=rf'^config: .* with memory\.offload \("{place}"\): this is not built'
    ):
        config(memory__offload=place, parallel__engine="fsdp")
    cfg = config(memory__offload=place)
    with pytest.raises(ValueError, match=rf'memory\.offload \("{place}"\) with 2 ranks on GPUs'):
        check_settings(cfg, "cuda", ranks=2)
    check_settings(cfg, "cuda")
    check_settings(cfg, "cpu", ranks=2)


def test_a_disk_without_room_is_said(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"has no room for 400 bytes more \(No space left on device\)"):
        Offload("disk").empty(100, CPU)


class FakeCudart:
    """What pins memory on a GPU. result: of cudaHostRegister."""

    def __init__(self, result: int = 0):
        self.pinned: dict[int, int] = {}
        self._result = result

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        assert flags == 1
        self.pinned |= {address: n_bytes} if self._result == 0 else {}
        return self._result

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]


def test_memory_beside_a_gpu_is_pinned_as_long_as_a_view_of_it_lives(monkeypatch):
    cudart, gpu = FakeCudart(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    x = Offload("host").empty(1000, gpu)
    view = x[10:20]
    assert cudart.pinned == {x.data_ptr(): 4000}
    assert not x.any()
    del x
    assert len(cudart.pinned) == 1
    view.fill_(1.0)
    del view
    assert cudart.pinned == {}
    assert Offload("host").empty(0, gpu).numel() == 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(result=2))
    with pytest.raises(ValueError, match=r"4000 bytes of the host could not be pinned"):
        Offload("host").empty(1000, gpu)


KILLED = """
import time
import torch
from zerokl.model.offload import Offload
x = Offload("disk").empty(1 << 20, torch.device("cpu")).fill_(1.0)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert str(tmp_path) in Path(f"/proc/{process.pid}/maps").read_text(), "the memory was a file there"
        process.kill()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["host", "disk"])
def test_autograd_gives_its_tensors_away(place: str, moved: dict[str, int]) -> None:
    x = torch.randn(40, requires_grad=True)
    y = x * 2
    with Offload(place).keeping():
        z = y.sin()
    assert moved == {"state": 0, "activations": 160}
    z.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x.detach()).cos())
