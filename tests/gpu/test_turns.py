"""Decoding turns of the native sampler on a fake GPU: the host does nothing inside a captured turn."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from zerokl.engine.rollout import decode
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.kernels import draw, truncation
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import TileTable
from zerokl.model import cache
from zerokl.model.decoder import COMPUTE, Decoder, Numerics

from tests.gpu.device import Device, gpu, model, plant
from tests.helpers import DTYPES

GREEDY, ALL, WARM = SamplingParams(0.0), SamplingParams(), SamplingParams(0.7)
TOP_K, TOP_P, BOTH = SamplingParams(1.0, 5), SamplingParams(1.0, 0, 0.9), SamplingParams(0.7, 5, 0.9)
SAMPLING = [GREEDY, ALL, WARM, TOP_K, TOP_P, BOTH, SamplingParams(0.7, 5), SamplingParams(0.7, 0, 0.9)]
NUMERICS = {
    "compute": COMPUTE,
    "lm_head fp32": Numerics(lm_head=torch.float32),
    "lm_head fp16": Numerics(lm_head=torch.float16),
    "cache bf16": Numerics(cache=torch.bfloat16),
    "all": Numerics(torch.float32, torch.float16, TileTable("of this test", {"hopper": {16: ((64, 64),)}})),
}
# The first crosses a page, and begins a second one.
PROMPTS = [[20] * 40, [30, 31]]


def generate(decoder: Decoder, sampling_params: SamplingParams = ALL, noise: float = 0.0) -> None:
    requests = GenerationParams(sampling_params, 2, 11, frozenset({1, 2})).requests(PROMPTS, RngKey(1, 2))
    draw_params = requests[0].draw_params._replace(logit_noise=noise)
    NativeSampler(decoder).generate([replace(request, draw_params=draw_params) for request in requests])


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sampling_params", SAMPLING, ids=str)
def test_the_host_does_nothing_in_a_captured_turn(sampling_params, dtype, numerics, target):
    with gpu(target) as device:
        decoder = model(dtype, NUMERICS[numerics])
        generate(decoder, sampling_params)
    (graph,) = device.captures
    assert graph.replays >= 10
    assert device.in_graphs() == []
    assert len(device.launches) > 80  # two turns before the capture and the capture, beside the prompts


def _outside(device: Device) -> set[str]:
    return device.places("copy", "upload", "wait")


# Where the host begins a call, reads prompts, writes rows, and looks at what they drew.
AROUND = {
    "engine/rollout/decode.py: DecodeRows.__init__",
    "engine/rollout/decode.py: DecodeRows._write",
    "engine/rollout/decode.py: Look.__init__",
    "engine/rollout/decode.py: Look.read",
    "kernels/upload.py: upload",
    "model/cache.py: BlockCache.allocate",
    "model/cache.py: BlockCache.copy",
    "model/cache.py: CachedContext.__init__",
    "model/decoder.py: Decoder._embed",
    "model/decoder.py: Decoder._rotation",
}
NOISE = "engine/rollout/decode.py: DecodeRows._noise"


def test_around_the_turns_the_host_waits_where_it_looks_only():
    with gpu() as device:
        generate(model(torch.bfloat16), BOTH)
    assert device.places("wait") == {"engine/rollout/decode.py: Look.read"}
    assert _outside(device) <= AROUND


def test_turns_with_noise_copy_the_noise_and_are_not_captured():
    with gpu() as device:
        generate(model(torch.bfloat16), BOTH, noise=0.1)
    assert device.captures == []
    assert NOISE in _outside(device) <= AROUND | {NOISE}


class Fault(NamedTuple):
    """A line that may not be in a captured turn, and what the host does there."""

    module: object
    line: str
    fault: str
    kind: str


FAULTS = {
    # It was there once: every turn with top-k or top-p and a temperature failed on a GPU.
    "a temperature of the host": Fault(
        truncation, "z.new_full((), params.temperature)", "z.new_tensor(params.temperature)", "copy"
    ),
    "a list as an index": Fault(truncation, "drop[:, -1] = False", "drop[:, [-1]] = False", "copy"),
    "a number that is read": Fault(decode, "drawn += 1\n", "drawn += int(done.sum()) + 1\n", "wait"),
    "a mask": Fault(
        decode, "state[_Field.TOKEN, a:b] = ids", "ids[ids < 0] = 0; state[_Field.TOKEN, a:b] = ids", "wait"
    ),
    "a copy back": Fault(
        cache, "self._offset = positions % KEY_TILE", "self._offset = positions % positions.cpu()[0]", "wait"
    ),
    "ids of the host": Fault(
        draw,
        "return ids.clamp_(max=e.shape[1] - 1)",
        "return ids.minimum(torch.tensor([e.shape[1] - 1]).to(ids.device))",
        "copy",
    ),
    "a synchronisation": Fault(
        decode, "memory.turn += 1\n", "memory.turn += 1; torch.cuda.synchronize()\n", "wait"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_a_fault_in_a_turn_is_named_with_file_and_line(name, monkeypatch):
    module, line, fault, kind = FAULTS[name]
    with gpu() as device:
        place = plant(monkeypatch, module, line, fault)
        generate(model(torch.bfloat16), BOTH)
    (said,) = set(device.in_graphs())
    assert said.startswith(f"{place} (")
    assert f": {kind} by " in said
