"""CUDA graphs of decoding turns, captured and replayed on a CPU: no bit differs from turns without graphs.

The sampler runs as on a GPU: its memory and its graphs live on from call to call, and a replay runs none of
the sampler's code. Kernels are interpreted, on the memory of the CPU.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from zerokl.engine.rollout import decode, generation
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import DrawParams, GenerationParams, Request, RngKey, complete
from zerokl.kernels import draw_triton
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.kernels.launch import launch as launch_now
from zerokl.kernels.philox import Stream
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.weights import Layout

from tests.gpu.cuda_graph import FreedMemoryError
from tests.gpu.device import (
    Device,
    as_if_the_table_moved,
    as_if_weights_never_moved,
    fake_cuda,
    plant,
)
from tests.gpu.fake_cuda import CPU, CUDA, DeviceTensor, FakeCuda, memory_of, pointers
from tests.guessers import Oracle
from tests.helpers import randn
from tests.triton.launchers import LAUNCHERS
from tests.triton.test_model import RAW

PROMPTS = [[20] * 3, [30, 31]]
MAX_TOKENS = 4
STOP = frozenset(range(12))  # a fifth of the vocabulary, so that completions end at different turns
ALL, GREEDY, TOP_P = SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, 5, 0.9)
FILTERED = SamplingParams.of(0.9, 20, 0.95, 0.02, {3: 2.0, 40: -1.0}, range(0, 61, 2))
KEY = RngKey(3, 0)


def _memory(x: Any) -> Any:
    """An argument of a launch as the interpreter takes it."""
    if isinstance(x, DeviceTensor):
        return memory_of(x)
    if hasattr(x, "block_shape"):  # a TensorDescriptor
        descriptor = copy.copy(x)
        descriptor.base = _memory(x.base)
        return descriptor
    return x


def _run(kernel: Any, grid: tuple[int, ...], options: dict[str, Any], *args: Any) -> None:
    with _disable_current_modes():
        launch_now(kernel, grid, *args, **options)


@contextmanager
def interpreted_gpu() -> Iterator[Device]:
    """A device with the CPU's memory, on which kernels are interpreted."""
    device = Device(FakeCuda(CPU))

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        run, memory = partial(_run, kernel, grid, options), tree_map(_memory, args)
        if device.cuda.capture is not None:
            device.cuda.capture.launch(run, memory)
        else:
            device.cuda.timeline.operation((), pointers(args))
            run(*memory)

    # Few and large programs, which are interpreted in half the time: Ampere's tiles, and whole rows.
    with pytest.MonkeyPatch.context() as patch, tiles_of_target("sm_80"), fake_cuda(device):
        patch.setattr(draw_triton, "SPLITS", 1)
        for module in LAUNCHERS:
            patch.setattr(module, "launch", launch)
        yield device


class Pair:
    """A sampler with graphs on the device, and the weights of one on the host that has no graphs."""

    def __init__(self, device: Device, dtype: torch.dtype = torch.bfloat16, numerics: Numerics = COMPUTE):
        config = ModelConfig.from_dict(RAW | {"num_hidden_layers": 1})
        layout = Layout(config)
        flat = randn(0, layout.numel, scale=0.15)
        for view in layout.views(flat).values():
            if view.dim() == 1:
                view.fill_(1.0)
        flat = flat.to(dtype)
        self.host = Decoder(config, flat, layout, numerics)
        self.decoder = Decoder(config, flat.to(CUDA), layout, numerics)
        self.sampler, self._device = NativeSampler(self.decoder, max_concurrency=3), device
        self.cached: list[int] = []  # in each turn of equal_turns

    def update(self, seed: int) -> None:
        """Change the weights where they lie, as the optimizer does."""
        change = randn(seed, self.host.layout.numel, scale=0.05).to(self.host.dtype)
        self.host.flat.detach().add_(change)
        self.decoder.flat.detach().add_(change.to(CUDA))

    def move(self) -> None:
        """Move the weights to other memory, and zero the memory that they had."""
        old = self.decoder.flat.detach()
        self.decoder.move_to(torch.empty_like(old))
        old.zero_()

    def equal(
        self,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        sampling_params: SamplingParams = ALL,
        key: RngKey = KEY,
    ) -> bool:
        """Whether both draw the same, to the bit."""
        params, before = GenerationParams(sampling_params, 2, MAX_TOKENS, STOP), self.replays
        graphs, turns = (
            [(r.prompt, r.sample, r.ids, r.logprobs.tobytes(), r.finish) for r in rollouts]
            for rollouts in (
                complete(sampler, prompts, params, key)
                for sampler in (self.sampler, NativeSampler(self.host))
            )
        )
        assert self.replays > before
        return graphs == turns

    def equal_turns(self) -> list[bool]:
        """Whether both draw the same, to the bit, in each of four turns of two trajectories.

        The sampler with graphs goes on from its cache; the other one reads everything. In the first turn one
        trajectory ends two tokens before a block does, and its row goes on beside the other one. The weights
        change before the last turn.
        """
        ids, drawn, equal = [(20,) * 30, (30,) * 33], [0, 0], []
        for turn, most in enumerate(((3, 6), (2, 3), (2, 2), (2, 2))):
            if turn == 3:
                self.update(1)
                self.sampler.sync_weights(1)
            requests = [
                Request(ids[i], replace(KEY, prompt=i), DrawParams(ALL, frozenset()), most[i], drawn[i], 64)
                for i in range(2)
            ]
            graphs = self.sampler.generate(requests)
            turns = NativeSampler(self.host).generate([replace(r, trajectory_tokens=0) for r in requests])
            pairs = list(zip(graphs, turns, strict=True))
            equal.append(
                all(a.ids == b.ids and a.logprobs.tobytes() == b.logprobs.tobytes() for a, b in pairs)
            )
            self.cached.append(self.sampler.tokens_cached)
            drawn = [n + len(c.ids) for n, c in zip(drawn, graphs, strict=True)]
            ids = [(*x, *c.ids, 50 + turn) for x, c in zip(ids, graphs, strict=True)]
        return equal

    @property
    def replays(self) -> int:
        """How often graphs were replayed."""
        return sum(graph.replays for graph in self._device.captures)


def test_graphs_draw_the_same_over_generations():
    with interpreted_gpu() as device:
        pair = Pair(device)
        assert pair.equal()
        captures = len(device.captures)
        pair.update(1)
        other_prompts = [[20] * 2, [50, 51]]
        assert pair.equal(other_prompts, key=RngKey(3, 1)), "updated weights, other prompts, another step"
        assert len(device.captures) == captures, "the same graphs"
        assert pair.equal(sampling_params=GREEDY), "greedy"
        assert pair.equal(sampling_params=TOP_P), "top-k and top-p"
        assert pair.equal(sampling_params=FILTERED), "every filter"
        assert pair.equal(key=RngKey(4, 0, Stream.EVALUATE)), "another seed and stream"
        pair.update(2)
        pair.move()
        assert pair.equal([[20] * 33, [30]]), "weights and cache in other memory"
        assert not device.in_graphs()
        assert device.cuda.timeline.faults == []


def test_trajectories_go_on_from_the_cache_under_graphs():
    with interpreted_gpu() as device:
        pair = Pair(device)
        assert pair.equal_turns() == [True] * 4
        assert pair.cached == [0, 32, 64, 0]
        assert not device.in_graphs()


def test_guessed_tokens_change_no_bit_under_graphs():
    """What is drawn is known, and the graphs are those of so many rows as there are guesses."""
    with interpreted_gpu() as device:
        pair = Pair(device)
        params = GenerationParams(GREEDY, 2, MAX_TOKENS, STOP)
        known = Oracle(complete(NativeSampler(pair.host), PROMPTS, params, KEY))
        pair.sampler = NativeSampler(pair.decoder, max_concurrency=3, speculate=2, guesser=known)
        assert pair.equal(sampling_params=GREEDY)
        assert pair.sampler.stopwatch.counts["guesses_drawn"] > 0
        assert not device.in_graphs()
        assert device.cuda.timeline.faults == []


@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [
        (torch.bfloat16, Numerics(lm_head=torch.float32)),
        (torch.float32, Numerics(cache=torch.bfloat16)),
    ],
    ids=["lm_head fp32", "cache bf16"],
)
def test_graphs_draw_the_same_with_other_numerics(dtype, numerics):
    with interpreted_gpu() as device:
        pair = Pair(device, dtype, numerics)
        assert pair.equal()
        pair.update(1)
        assert pair.equal()
        assert not device.in_graphs()
        assert device.cuda.timeline.faults == []


@pytest.mark.full
def test_graphs_draw_the_same_where_samples_share_chunks_of_attention():
    with interpreted_gpu() as device:
        pair = Pair(device, numerics=Numerics(attention=AttentionRule(64)))
        assert pair.equal([[20] * 66]), "a prompt with a chunk that its two samples share"
        shared = pair.sampler._memory.shared.tokens.cpu() >= 0
        assert shared.sum(dim=1).max() == 2
        captures = len(device.captures)
        assert pair.equal([[30]]), "rows of one chunk"
        assert len(device.captures) > captures, "graphs of their own"
        assert not device.in_graphs()
        assert device.cuda.timeline.faults == []


def test_control_graphs_that_are_kept_though_the_weights_moved(monkeypatch):
    plant(monkeypatch, decode.DecodeRows, "start", as_if_weights_never_moved)
    with interpreted_gpu() as device:
        pair = Pair(device)
        assert pair.equal()
        pair.move()
        assert not pair.equal()


def test_control_a_table_that_is_written_to_another_tensor(monkeypatch):
    plant(monkeypatch, decode.DecodeRows, "_write", as_if_the_table_moved)
    with interpreted_gpu() as device, pytest.raises(FreedMemoryError):
        Pair(device).equal()


def test_control_an_lm_head_in_another_dtype_that_is_not_copied_again(monkeypatch):
    def start(plain, rows, packed):
        before = rows._lm_head.clone() if rows._graphs else None
        plain(rows, packed)
        if before is not None:
            rows._lm_head.copy_(before)

    plant(monkeypatch, decode.DecodeRows, "start", start)
    with interpreted_gpu() as device:
        pair = Pair(device, numerics=Numerics(lm_head=torch.float32))
        assert pair.equal()
        pair.update(1)
        assert not pair.equal()


def test_control_graphs_that_serve_another_seed(monkeypatch):
    def first(plain, sampler, memory, kind):
        return plain(sampler, memory, next(iter(sampler._decoding), kind))

    plant(monkeypatch, NativeSampler, "_decoding_of", first)
    with interpreted_gpu() as device:
        pair = Pair(device)
        assert pair.equal()
        assert not pair.equal(key=RngKey(4, 0))


def test_control_the_keys_of_what_was_drawn_past_an_end(monkeypatch):
    def written(plain, sample):
        return (*sample.prefix.ids, *sample.tokens)[:-1]

    plant(monkeypatch, generation.Sample, "written", written)
    with interpreted_gpu() as device:
        assert Pair(device).equal_turns()[:2] == [True, False]


@pytest.mark.full
def test_control_blocks_that_are_kept_though_the_weights_changed(monkeypatch):
    plant(monkeypatch, NativeSampler, "sync_weights", lambda *_: None)
    with interpreted_gpu() as device:
        assert Pair(device).equal_turns() == [True, True, True, False]
