"""No descriptor of a training pass or of sampling breaks a rule of TMA, whatever the model's widths."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from zerokl import kernels
from zerokl.benchmarks.machine import model_config
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.shard import ShardWork
from zerokl.kernels import tiles
from zerokl.kernels.attention_tables import Spans
from zerokl.kernels.launch import Launch
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

from tests.gpu.descriptors import broken_maps, broken_rules, descriptors
from tests.gpu.device import Device, gpu, plant
from tests.gpu.fake_cuda import CUDA
from tests.gpu.test_passes import make_shard

# Family, hidden width, MLP width, query heads, key-value heads, head width, vocabulary, tied embeddings
MODELS = {
    "Qwen3-0.6B": ("Qwen3", 1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-8B": ("Qwen3", 4096, 12288, 32, 8, 128, 151936, False),
    "Qwen2.5-0.5B": ("Qwen2", 896, 4864, 14, 2, 64, 151936, True),
    "SmolLM2-135M": ("Llama", 576, 1536, 9, 3, 64, 49152, True),
    "rows of 2008 bytes": ("Qwen3", 1004, 3004, 4, 2, 64, 4096, False),
    "an odd vocabulary": ("Qwen3", 1032, 2056, 6, 3, 64, 4095, False),
    "heads of 32": ("Llama", 72, 136, 5, 1, 32, 999, True),
}
# The kernels whose arguments are descriptors, and where it is not all of them, those of a model.
PRODUCTS, ATTENTION = {"_matmul_tma", "_outer_tma"}, {"_forward_tma", "_backward_q_tma", "_backward_kv_tma"}
ARE_ALL = {"rows of 2008 bytes": ATTENTION, "heads of 32": PRODUCTS}


def decoder(name: str, dtype: torch.dtype) -> Decoder:
    """Two layers of a model on the device."""
    family, D, inner, heads, kv_heads, head_dim, vocab, tied = MODELS[name]
    config = model_config(
        family, D, inner, heads, kv_heads, head_dim, layers=2, vocab=vocab, tied=tied, context=1024
    )
    layout = Layout(config)
    return Decoder(config, torch.zeros(layout.numel, dtype=dtype, device=CUDA), layout)


def train(model: Decoder, in_flight: int) -> None:
    """A pass over shards whose prompts have 9 tokens or one, and whose completions have 3 and 43."""
    work = ShardWork(SamplingParams(), LossConfig(), 128)
    ShardSum(model, 64, in_flight).add(work, [make_shard(i) for i in range(in_flight)])


def sample(model: Decoder) -> None:
    """Prompts, one of them in chunks, and turns."""
    sampler = NativeSampler(model, max_batch_tokens=100)
    params = GenerationParams(SamplingParams(), 2, 11, frozenset({1, 2}))
    complete(sampler, [[20] * 150, [30, 31], [5]], params, RngKey(1, 2))


@pytest.fixture
def few_rows(monkeypatch) -> None:
    """Products of few rows go through TMA as those of many do."""
    monkeypatch.setattr(tiles, "_TMA_MIN_TILES", 1)


def kernels_of(launches: list[Launch]) -> set[str]:
    """The kernels that took a descriptor."""
    return {launch.kernel.__name__ for launch in launches if any(descriptors(launch))}


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_descriptors_of_passes_and_of_sampling_break_no_rule(name, dtype, in_flight, few_rows):
    with gpu() as device:
        model = decoder(name, dtype)
        train(model, in_flight)
        pass_launches = len(device.launches)
        sample(model)
    assert broken_rules(device.launches) == []
    assert kernels_of(device.launches[:pass_launches]) == ARE_ALL.get(name, PRODUCTS | ATTENTION)
    assert kernels_of(device.launches[pass_launches:]) == ARE_ALL.get(name, PRODUCTS) & {"_matmul_tma"}


# What a descriptor of `_boxes` in matmul_tma_triton.py may not be, and the rule that it breaks.
FAULTS = {
    "a view that begins with the second column": (
        lambda boxes: boxes._replace(base=boxes.base[:, 1:]),
        r"the address \(0x[0-9a-f]+2\) must be a multiple of 16 bytes",
    ),
    "an odd stride": (
        lambda boxes: boxes._replace(strides=[boxes.strides[0] + 1, 1]),
        r"strides\[0\] \(2050 bytes\) must be a multiple of 16 bytes",
    ),
    "blocks of 512 rows": (
        lambda boxes: boxes._replace(block_shape=[4 * boxes.block_shape[0], boxes.block_shape[1]]),
        r"block\[0\] \(512\) must be 1 to 256",
    ),
}


def products(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> Device:
    """A pass of the 0.6B. change: a descriptor of its products -> another one in its place."""
    with gpu() as device:
        plant(
            patch,
            import_module(f"{kernels.__name__}.matmul_tma_triton"),
            "_boxes",
            lambda plain, *args: change(plain(*args)),
        )
        train(decoder("Qwen3-0.6B", torch.bfloat16), 1)
    return device


@pytest.mark.parametrize("name", FAULTS)
def test_control_a_fault_is_named_with_kernel_argument_and_rule(name, few_rows, monkeypatch):
    change, rule = FAULTS[name]
    lines = broken_rules(products(monkeypatch, change).launches)
    assert any(re.fullmatch(f"_matmul_tma, x_desc: {rule}", x) for x in lines), lines[:9]


def test_control_rows_at_odd_addresses_are_seen(few_rows):
    with gpu() as device:
        products = import_module(f"{kernels.__name__}.matmul_triton")
        products.readable = lambda *_: True
        train(decoder("rows of 2008 bytes", torch.bfloat16), 1)
    assert "_outer_tma, x_desc: strides[1] (2008 bytes) must be a multiple of 16 bytes" in broken_rules(
        device.launches
    )


def test_rows_that_lie_on_one_another_do_not_go_through_tma(few_rows):
    with gpu() as device:
        matmul = import_module(f"{kernels.__name__}.matmul_triton").matmul
        x, w = (torch.zeros(n, 64, dtype=torch.bfloat16, device=CUDA) for n in (1, 256))
        matmul(x.expand(256, 64), w)
        assert kernels_of(device.launches) == set()
        matmul(w, w)
    assert kernels_of(device.launches) == {"_matmul_tma"}


def test_one_token_may_have_any_stride_in_the_backward_of_attention():
    H, D = 4, 64
    with gpu() as device:
        attention = import_module(f"{kernels.__name__}.attention_bwd_triton")
        ints = (torch.zeros(*shape, dtype=torch.int32, device=CUDA) for shape in ((2,), (1,), (1, 4), (1, 6)))
        starts, lengths, *tables = ints
        q, k = (torch.zeros(1, heads, D, dtype=torch.bfloat16, device=CUDA) for heads in (H, 2))
        do = torch.zeros(1, H, D, dtype=torch.bfloat16, device=CUDA).as_strided((1, H, D), (7, D, 1))
        assert do.is_contiguous()
        lse = torch.zeros(1, H, device=CUDA)
        attention.attention_bwd(do, q, k, k, q, lse, Spans(starts, lengths, None, 2, starts, *tables), 1.0)
    assert kernels_of(device.launches) == {"_backward_q_tma", "_backward_kv_tma"}
    assert broken_rules(device.launches) == []


class Descriptor(NamedTuple):
    """Of a matrix that breaks no rule."""

    base: torch.Tensor = torch.zeros(64, 64, dtype=torch.bfloat16)
    shape: Sequence[int] = (64, 64)
    strides: Sequence[int] = (64, 1)
    block_shape: Sequence[int] = (64, 64)


def kernel(desc, other_desc, n):
    """Has two descriptors."""


def said(**changed: object) -> list[str]:
    """The rules that a descriptor breaks which is the good one but for `changed`."""
    launch = Launch(kernel, (Descriptor(), Descriptor(**changed), 3), {})
    start = "kernel, other_desc: "
    lines = broken_rules([launch])
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start) for line in lines]


RULES = [
    ({"shape": [0, 64]}, "shape[0] (0) must be 1 to 2^32"),
    ({"shape": [64, 2**32 + 1]}, f"shape[1] ({2**32 + 1}) must be 1 to 2^32"),
    ({"strides": [0, 1]}, "strides[0] (0) must be positive"),
    ({"strides": [-64, 1]}, "strides[0] (-64) must be positive"),
    ({"strides": [68, 1]}, "strides[0] (136 bytes) must be a multiple of 16 bytes"),
    ({"strides": [2**39, 1]}, f"strides[0] ({2**40} bytes) must be below 2^40"),
    ({"strides": [64, 2]}, "strides[1] (2) must be 1: elements of a row lie side by side"),
    ({"block_shape": [257, 64]}, "block[0] (257) must be 1 to 256"),
    ({"block_shape": [0, 64]}, "block[0] (0) must be 1 to 256"),
    ({"block_shape": [64, 4]}, "a row of the block (8 bytes) must be a multiple of 16 bytes"),
    ({"block_shape": [64, 72]}, "a row of the block (144 bytes) must fill spans of 128 bytes"),
    (
        {"strides": [64, 64, 1]},
        "shape, strides and block have (2, 3, 2) numbers, which must be equal and 1 to 5",
    ),
]


@pytest.mark.parametrize(("changed", "rule"), RULES, ids=[rule for _, rule in RULES])
def test_each_rule_is_checked(changed, rule):
    assert said(**changed) == [rule]


def test_what_the_rules_allow_breaks_none():
    assert said(shape=[2**32, 1], strides=[2**39 - 8, 1], block_shape=[256, 256]) == []
    six = {"shape": [1] * 6, "strides": [8] * 5 + [1], "block_shape": [1] * 5 + [8]}
    (line,) = said(**six)
    assert line.startswith("shape, strides and block have (6, 6, 6) numbers")
    (line,) = said(base=Descriptor().base.view(-1)[1:])
    assert line.startswith("the address (0x")


@pytest.mark.parametrize(
    ("box", "swizzle", "rules"),
    [
        ([64, 64], 3, []),
        ([64, 64], 0, []),
        ([64, 32], 2, []),
        ([64, 64], 2, ["a row of the block (128 bytes) must fit the swizzle's 64 bytes"]),
        ([48, 64], 3, ["block[0] (64) must be a multiple of the box's side (48)"]),
        ([64, 4], 1, ["a row of the block (8 bytes) must be a multiple of 16 bytes"]),
    ],
)
def test_the_box_of_a_map_is_checked(box, swizzle, rules):
    launch = Launch(kernel, (Descriptor(), 3, 4), {})
    lines = broken_maps(launch, [{"block_size": box, "swizzle": swizzle}])
    assert lines == [f"kernel, desc: {rule}" for rule in rules]
