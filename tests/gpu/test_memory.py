"""What the native sampler keeps on a GPU from call to call: its memory and its graphs."""

from collections.abc import Sequence

import pytest
import torch
from zerokl.engine.rollout import decode
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.philox import Stream
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache

from tests.gpu.device import as_if_weights_never_moved, gpu, model, plant

PROMPTS = [[20] * 40, [30, 31]]
KEY = RngKey(1, 2)
ALL, TOP_P = SamplingParams(), SamplingParams(0.7, 0, 0.9)


class Calls:
    """Calls of one sampler on a device. memories: of each call. captures: how many there were after it."""

    def __init__(self, device, cache_blocks: int = 0):
        self.device, self.decoder = device, model(torch.bfloat16)
        block_bytes = BlockCache.bytes_per_block(self.decoder.config, self.decoder.cache_dtype)
        self.sampler = NativeSampler(self.decoder, cache_bytes=cache_blocks * block_bytes)
        self.memories, self.captures = [], []

    def __call__(
        self,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        sampling_params: SamplingParams = ALL,
        key: RngKey = KEY,
    ) -> None:
        complete(self.sampler, prompts, GenerationParams(sampling_params, 2, 11, frozenset({1, 2})), key)
        self.memories.append(self.sampler._memory)
        self.captures.append(len(self.device.captures))

    @property
    def same_memory(self) -> list[bool]:
        """For each call after the first, whether its memory was that of the call before it."""
        return [a is b for a, b in zip(self.memories, self.memories[1:], strict=False)]


def test_memory_and_graphs_are_kept_where_nothing_larger_is_needed():
    with gpu() as device:
        call = Calls(device)
        call()
        call([[21] * 33, [5] * 7], key=RngKey(1, 3))
        call([[21] * 3])  # fewer rows, which have a graph of their own
        call()
    assert call.memories[0] is not None
    assert call.same_memory == [True, True, True]
    assert call.captures == [1, 1, 2, 2]


def test_each_kind_of_request_has_graphs_of_its_own_over_one_memory():
    with gpu() as device:
        call = Calls(device)
        call()
        call(sampling_params=TOP_P)
        call(key=RngKey(8, 2))
        call(key=RngKey(1, 2, Stream.EVALUATE))
        call()
        call(sampling_params=TOP_P)
    assert call.same_memory == [True] * 5
    assert call.captures == [1, 2, 3, 4, 4, 4]


def test_larger_prompts_get_new_memory_and_new_graphs():
    with gpu() as device:
        call = Calls(device)
        for prompts in (PROMPTS, [[20] * 100, [30, 31]], PROMPTS, [[3], [4], [5]]):
            call(prompts)
    assert call.same_memory == [False, True, False]
    assert call.captures == [1, 2, 2, 3]


def test_calls_of_two_shapes_by_turns_share_memory_and_graphs():
    """Few long prompts and many short ones, as training and evaluation ask for: the memory holds both."""
    with gpu() as device:
        call = Calls(device)
        for _ in range(3):
            call([[20] * 100])
            call([[i] for i in range(20, 30)])
    assert call.same_memory == [False, True, True, True, True]
    assert call.captures[2:] == [call.captures[2]] * 4


def test_weights_in_other_memory_get_new_graphs_and_weights_in_place_do_not():
    with gpu() as device:
        call = Calls(device)
        call()
        call.decoder.flat.detach().mul_(0.5)
        call()
        call.decoder.move_to(torch.empty_like(call.decoder.flat.detach()))
        call()
    assert call.same_memory == [True, True]
    assert call.captures == [1, 1, 2]


def test_a_call_that_fails_leaves_no_memory():
    numbers = {torch.float32: float("nan"), torch.int64: 7}

    def answer(x: torch.Tensor) -> torch.Tensor:
        return torch.full(x.shape, numbers[x.dtype], dtype=x.dtype)

    with gpu(answer=answer) as device:
        call = Calls(device)
        with pytest.raises(FloatingPointError, match="not finite"):
            call()
        assert call.sampler._memory is None
        numbers[torch.float32] = -1.0
        call()
        call()
    assert call.same_memory == [True]


def test_memory_is_kept_where_the_limit_of_the_cache_binds():
    with gpu() as device:
        call = Calls(device, cache_blocks=5)  # of 7, for all samples at once
        for _ in range(4):
            call()
            assert call.sampler.samples_at_once < 4
    assert call.same_memory == [True] * 3
    assert call.captures == [call.captures[0]] * 4


def test_memory_is_kept_though_it_is_not_free_any_more():
    with gpu() as device:
        call = Calls(device)
        for free_bytes in (80 << 30, 1 << 20, 0):
            device.free_bytes = free_bytes
            call()
    assert call.same_memory == [True, True]


def test_control_memory_that_is_not_kept_is_seen(monkeypatch):
    def forgetful(plain, self, *args):
        others = plain(self, *args)
        self._memory, self._decoding = None, {}
        return others

    plant(monkeypatch, NativeSampler, "_run_kind", forgetful)
    with gpu() as device:
        call = Calls(device)
        call()
        call()
    assert call.captures == [1, 2]


def test_control_graphs_of_weights_that_moved_are_seen(monkeypatch):
    plant(monkeypatch, decode.DecodeRows, "start", as_if_weights_never_moved)
    with gpu() as device:
        call = Calls(device)
        call()
        call.decoder.move_to(torch.empty_like(call.decoder.flat.detach()))
        call()
    assert call.captures == [1, 1]
