"""Decoding turns of the native sampler on a fake GPU: the host does nothing inside a captured turn."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from zerokl.engine.rollout import decode, generation, prefix_cache
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.kernels import draw, truncation
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import TileTable
from zerokl.model import cache
from zerokl.model import decoder as decoders
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


def generate(
    decoder: Decoder, sampling_params: SamplingParams = ALL, noise: float = 0.0, experts: bool = False
) -> None:
    requests = GenerationParams(sampling_params, 2, 11, frozenset({1, 2})).requests(PROMPTS, RngKey(1, 2))
    draw_params = requests[0].draw_params._replace(logit_noise=noise, experts=experts)
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


LOOK, UPLOAD = "engine/rollout/decode.py: Look.__init__", "kernels/upload.py: upload"
READ = "engine/rollout/decode.py: Look.arrays"


def around(noise: float = 0.0) -> Device:
    """A call of a new sampler."""
    with gpu() as device:
        decoder = model(torch.bfloat16)
        device.cuda.events.clear()
        generate(decoder, BOTH, noise)
    return device


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_around_the_turns_the_host_waits_where_it_looks_only(noise):
    device = around(noise)
    assert device.places("wait") == {READ}
    assert device.places("copy") == set()
    assert device.places("upload") == {LOOK, UPLOAD}


def test_turns_with_noise_upload_the_noise_and_are_not_captured():
    sent = {}
    for noise in (0.0, 0.1):
        device = around(noise)
        sent[noise] = uploads(device)[0]
        assert (device.captures == []) == bool(noise)
    assert sent[0.1] > sent[0.0]


# A new memory: its padding page. A new kind of requests: the ids that stop. Then two prompts, each with two
# samples, which begin and end together: the blocks to fill with zeros; all that the reading of the prompts
# needs; the blocks to copy for the samples; the rows of the first draw; the rows of the turns. A look: ids
# and log-probabilities.
UPLOADS = ["memory", "stop ids", "zeros", "prompts", "copies", "first rows", "rows"]


def uploads(device: Device) -> tuple[int, int]:
    """The copies that do not wait: to the device, and back for the looks."""
    counts = Counter(f"{e.file}: {e.function}" for e in device.cuda.events if e.kind == "upload")
    return counts[UPLOAD], counts[LOOK]


def test_what_the_host_sends_together_goes_by_one_upload():
    assert uploads(around()) == (len(UPLOADS), 2 * 3)


class Around(NamedTuple):
    """A line that may not be around the turns, and what the host does there."""

    module: object
    line: str
    fault: str
    kind: str


AROUND = {
    "a list as an index of zeros": Around(cache, ".index_fill_(1, index, 0)", "[:, self._taken] = 0", "copy"),
    "lists as an index of copies": Around(
        cache,
        "by_block.index_copy_(1, target, by_block.index_select(1, source))",
        "by_block[:, list(targets)] = by_block[:, list(sources)]",
        "copy",
    ),
    "rows in memory that is not pinned": Around(
        decode,
        "tensors = upload(memory.state.device, *map(torch.from_numpy, (state, table)))",
        "tensors = [torch.from_numpy(x).to(memory.state.device) for x in (state, table)]",
        "copy",
    ),
    "ids in memory that is not pinned": Around(
        decoders,
        "(ids,) = upload_tables(self.device, context.tables, ids)",
        "ids = ids.to(self.device); upload_tables(self.device, context.tables)",
        "copy",
    ),
    "noise in memory that is not pinned": Around(
        decode, "upload(self.decoder.device, noise)[0]", "noise.to(self.decoder.device)", "copy"
    ),
    "a synchronisation": Around(
        generation, "self.cache.zero_taken()", "self.cache.zero_taken(); torch.cuda.synchronize()", "wait"
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_control_a_fault_around_the_turns_is_named_with_file_and_line(name, monkeypatch):
    module, line, fault, kind = AROUND[name]
    with gpu():
        place = plant(monkeypatch, module, line, fault)
    events = around(0.1 if "noise" in name else 0.0).cuda.events
    seen = {str(e) for e in events if e.kind in ("copy", "wait") and e.function != "Look.arrays"}
    assert seen
    assert all(x.startswith(f"{place} (") and f": {kind} by " in x for x in seen), seen


def test_control_blocks_that_are_filled_one_after_another_are_seen(monkeypatch):
    with gpu():
        plant(monkeypatch, prefix_cache, "return self._cache.take(n)", "return self._cache.allocate(n)")
    assert uploads(around())[0] > len(UPLOADS)


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
    (event,) = set(device.in_graphs())
    assert event.startswith(f"{place} (")
    assert f": {kind} by " in event
