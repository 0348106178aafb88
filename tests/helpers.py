"""Helpers that several tests share: seeded inputs, threads, equal bits, and accuracy against fp64."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.grad import GradBuffer
from zerokl.model.blocks.experts import MixtureOfExperts
from zerokl.model.blocks.residual import pre_norm
from zerokl.model.config import ModelConfig
from zerokl.model.sizes import Experts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torchrun(ranks: int, *words: str) -> list[str]:
    """The command that runs a script, or `-m` and a module, with its arguments in `ranks` processes."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *words,
    ]


def with_experts(config: ModelConfig, experts: Experts) -> ModelConfig:
    """The config with a mixture of experts in place of the MLP of the layers `experts.layers`."""
    sparse = [pre_norm(attention.block, MixtureOfExperts(experts)) for attention, _ in config.blocks]
    layers = range(config.layers)
    return replace(
        config, blocks=tuple(sparse[i] if i in experts.layers else config.blocks[i] for i in layers)
    )


def needs_gpus(n: int) -> pytest.MarkDecorator:
    """The mark of a test whose ranks send by nccl, each on a GPU of its own."""
    return pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} GPUs")


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files below a folder with their bytes, and the folders, but not the bytecode of the modules there.

    Python writes the bytecode of a user's module where it lies, as for any other module.
    """
    paths = (p for p in folder.rglob("*") if "__pycache__" not in p.parts)
    return {p: p.read_bytes() if p.is_file() else None for p in paths}


def fingerprint(run: Path) -> str:
    """Of a finished run, by its summary."""
    return json.loads((run / "summary.json").read_text())["fingerprint"]


def add_to_grad(buffer: GradBuffer, value: float) -> None:
    """Add `value` to each element of a weight's gradient in shard 0, as a backward function does."""
    buffer.zeroed([0])[0].add_(value)


def zero_buffers(weights: Iterable[torch.Tensor]) -> dict[torch.Tensor, GradBuffer]:
    """A gradient buffer of one shard for each weight."""
    return {w: GradBuffer.like(w) for w in weights}


def sums_of(buffers: Mapping[torch.Tensor, GradBuffer]) -> list[torch.Tensor]:
    """The sums of one shard in each buffer, in the order of the buffers."""
    return [buffer.zeroed([0])[0] for buffer in buffers.values()]


def property_settings(examples: int) -> settings:
    """Settings of a property: the number of its examples, of which `make test` takes a fifth.

    The share is that of the profile in conftest.py, in percent.
    """
    return settings(max_examples=max(2, examples * settings.default.max_examples // 100))


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def randint(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def total_unequal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> int:
    return sum(count_unequal(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def forgotten(probe: Callable) -> Iterator[None]:
    """Clear the cache of a probe of kernels/ before and after: no result goes into the block or out of it."""
    probe.cache_clear()
    try:
        yield
    finally:
        probe.cache_clear()


@contextmanager
def importable(folder: Path, name: str, source: str) -> Iterator[None]:
    """A module of this source, importable like one that a user wrote."""
    (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def write_letters_reward(folder: Path) -> None:
    """Write a module to `folder` with the reward "letters_reward:reward".

    The reward differs between completions, so that a step has a gradient.
    """
    (folder / "letters_reward.py").write_text(
        "def reward(problem, completion):\n    return float(sum(map(ord, completion)) % 7)\n"
    )


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_at_most_twice_the_error(
    ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str
) -> None:
    """Check that the errors of `ours` are at most twice those of `plain`, plain torch in the same dtype.

    `exact` is the result in fp64. Both the largest error and the norm of the error are checked.
    """
    assert exact.dtype == torch.float64
    assert ours.shape == exact.shape
    error, allowed = (ours.double() - exact).abs(), (plain.double() - exact).abs()
    assert torch.isfinite(error).all(), what
    assert error.max() <= 2 * allowed.max(), (
        f"{what}: largest error {error.max():.3e}, plain torch's {allowed.max():.3e}"
    )
    assert error.norm() <= 2 * allowed.norm(), (
        f"{what}: norm of the error {error.norm():.3e}, plain torch's {allowed.norm():.3e}"
    )


def assert_gradient_at_most_twice_the_error(
    ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]
) -> None:
    """As above, over the gradients of all weights of a model, each divided by its own norm.

    One weight alone has too few elements for a bound that holds on every CPU, as plain torch rounds otherwise
    on each. A wrong gradient of any weight is larger by orders of magnitude.
    """
    norms = {name: w.norm() for name, w in exact.items()}
    for name, norm in norms.items():
        assert norm > 0, name

    def joined(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([gradients[name].double().flatten() / norm for name, norm in norms.items()])

    assert_at_most_twice_the_error(joined(ours), joined(plain), joined(exact), "all weights")
