"""Decoding turns of the native sampler on a fake GPU: the host does nothing inside a captured turn."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from zerokl.benchmarks.device.families import family_config
from zerokl.engine.rollout import decode, generation
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.kernels import draw, truncation
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import TileTable
from zerokl.model import cache
from zerokl.model import decoder as decoders
from zerokl.model.decoder import COMPUTE, Decoder, Numerics

from tests.gpu.device import Device, Fault, gpu, model, model_of, plant
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


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_nor_in_one_of_a_model_with_states(family):
    """Samples copy the slot of their prompt, by one upload, and padding has a slot of its own."""
    with gpu() as device:
        decoder = model_of(family_config(family, is_small=True), torch.bfloat16)
        generate(decoder)
    (graph,) = device.captures
    assert graph.replays >= 10
    assert device.in_graphs() == []
    names = {launch.kernel.__name__ for launch in device.launches}
    assert {"_keep_inputs", "_keep_rows", "_delta_walk"} <= names
    assert device.places("wait") == {READ}
    assert device.places("copy") == set()


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
# needs; the blocks to copy for the samples; the rows of the first draw; the padding with which a graph is
# captured; the rows of the turns. A look: ids and log-probabilities.
UPLOADS = ["memory", "stop ids", "zeros", "prompts", "copies", "first rows", "padding", "rows"]


def uploads(device: Device) -> tuple[int, int]:
    """The copies that do not wait: to the device, and back for the looks."""
    counts = Counter(f"{e.file}: {e.function}" for e in device.cuda.events if e.kind == "upload")
    return counts[UPLOAD], counts[LOOK]


def test_what_the_host_sends_together_goes_by_one_upload():
    assert uploads(around()) == (len(UPLOADS), 2 * 3)


def lists_as_an_index_of_zeros(plain, self):
    if len(self._taken) < 2:  # the padding page
        return plain(self)
    self.data.view(self.config.layers, self.blocks, -1)[:, self._taken] = 0


def lists_as_an_index_of_copies(plain, self, sources, targets):
    by_block = self.data.view(self.config.layers, self.blocks, -1)
    by_block[:, list(targets)] = by_block[:, list(sources)]


def not_pinned(*dtypes):
    """An upload that sends tensors of these dtypes from ordinary memory."""

    def upload(plain, device, *tensors):
        return plain(device, *(x.to(device) if x.dtype in dtypes else x for x in tensors))

    return upload


def ids_not_pinned(plain, device, tables, ids):
    plain(device, tables)
    return (ids.to(device),)


def then_waits(plain, *args):
    plain(*args)
    torch.cuda.synchronize()


AROUND = {
    "a list as an index of zeros": Fault(
        lambda patch: plant(patch, cache.BlockCache, "zero_taken", lists_as_an_index_of_zeros),
        "engine/rollout/generation.py: Generation._start_samples",
        "zero_taken()",
        "copy",
    ),
    "lists as an index of copies": Fault(
        lambda patch: plant(patch, cache.BlockCache, "copy", lists_as_an_index_of_copies),
        "engine/rollout/generation.py: Generation._copy_partial_blocks",
        "cache.copy(",
        "copy",
    ),
    "rows in memory that is not pinned": Fault(
        lambda patch: plant(patch, decode, "upload", not_pinned(torch.int32)),
        "engine/rollout/decode.py: DecodeRows._write",
        "upload(",
        "copy",
    ),
    "ids in memory that is not pinned": Fault(
        lambda patch: plant(patch, decoders, "upload_tables", ids_not_pinned),
        "model/decoder.py: Forward._embed",
        "upload_tables(",
        "copy",
    ),
    "noise in memory that is not pinned": Fault(
        lambda patch: plant(patch, decode, "upload", not_pinned(torch.float32, torch.float64)),
        "engine/rollout/decode.py: DecodeRows._noise",
        "upload(",
        "copy",
    ),
    "a synchronisation": Fault(
        lambda patch: plant(patch, generation.Generation, "_copy_partial_blocks", then_waits),
        "engine/rollout/generation.py: Generation._start_samples",
        "_copy_partial_blocks(",
        "wait",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_control_a_fault_around_the_turns_is_named_with_file_and_line(name, monkeypatch):
    AROUND[name].plant(monkeypatch)
    events = around(0.1 if "noise" in name else 0.0).cuda.events
    seen = {e for e in events if e.kind in ("copy", "wait") and e.function != "Look.arrays"}
    assert seen
    assert all(map(AROUND[name].named, seen)), list(map(str, seen))


def test_control_blocks_that_are_filled_one_after_another_are_seen(monkeypatch):
    def take(plain, self, n):
        blocks = plain(self, n)
        self.zero_taken()
        return blocks

    plant(monkeypatch, cache.BlockCache, "take", take)
    assert uploads(around())[0] > len(UPLOADS)


def temperature_of_the_host(plain, logits, params, *rest):
    return plain(logits / logits.new_tensor(params.temperature), params, *rest)


def list_as_an_index(plain, z, *rest):
    kept = plain(z, *rest)
    kept[:, [-1]] = 0.0
    return kept


def reads_a_number(plain, self, state):
    int(state[0].sum())
    plain(self, state)


def masks_ids(plain, *args):
    ids, logp = plain(*args)
    ids[ids < 0] = 0
    return ids, logp


def copies_back(plain, memory, positions, *rest):
    positions.cpu()
    return plain(memory, positions, *rest)


def ids_of_the_host(plain, e, u):
    return plain(e, u).minimum(torch.tensor([e.shape[1] - 1]).to(e.device))


FAULTS = {
    # It was there once: every turn with top-k or top-p and a temperature failed on a GPU.
    "a temperature of the host": Fault(
        lambda patch: plant(patch, truncation, "_scaled", temperature_of_the_host),
        "kernels/truncation.py: scaled_logits",
        "_scaled(",
        "copy",
    ),
    "a list as an index": Fault(
        lambda patch: plant(patch, truncation, "_truncated", list_as_an_index),
        "kernels/truncation.py: _scaled",
        "_truncated(",
        "copy",
    ),
    "a number that is read": Fault(
        lambda patch: plant(patch, decode.DecodeRows, "_advance", reads_a_number),
        "engine/rollout/decode.py: DecodeRows._draw",
        "_advance(",
        "wait",
    ),
    "a mask": Fault(
        lambda patch: plant(patch, decode, "draw_tokens", masks_ids),
        "engine/rollout/decode.py: DecodeRows._draw",
        "draw_tokens(",
        "wait",
    ),
    "a copy back": Fault(
        lambda patch: plant(patch, decode, "DecodeContext", copies_back),
        "engine/rollout/decode.py: DecodeRows._turn",
        "DecodeContext(",
        "wait",
    ),
    "ids of the host": Fault(
        lambda patch: plant(patch, draw, "_invert", ids_of_the_host),
        "kernels/draw.py: draw",
        "_invert(",
        "copy",
    ),
    "a synchronisation": Fault(
        lambda patch: plant(patch, decode.DecodeRows, "_advance", then_waits),
        "engine/rollout/decode.py: DecodeRows._draw",
        "_advance(",
        "wait",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_a_fault_in_a_turn_is_named_with_file_and_line(name, monkeypatch):
    FAULTS[name].plant(monkeypatch)
    with gpu() as device:
        generate(model(torch.bfloat16), BOTH)
    (event,) = {e for e in device.cuda.events if e.captured}
    assert FAULTS[name].named(event), str(event)
