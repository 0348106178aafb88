"""What several tests share:

seeded inputs, threads, and the two judgements, equal bits and accuracy against fp64.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from hypothesis import settings
from zerokl.verify.bitwise import count_unequal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torchrun(ranks: int, *words: str) -> list[str]:
    """The command that runs a script (or -m and a module) with its words in this many processes."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *words,
    ]


def property_settings(examples: int) -> settings:
    """Hypothesis with the same examples in every run, and no limit on the time of one."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def randint(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def total_unequal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> int:
    return sum(count_unequal(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def forgotten(probe: Callable) -> Iterator[None]:
    """What a cached probe of kernels/ found before is not known inside, nor what it finds inside afterwards."""
    probe.cache_clear()
    try:
        yield
    finally:
        probe.cache_clear()


def write_letters_reward(folder: Path) -> None:
    """A module in `folder` whose reward, "letters_reward:reward", differs between completions, so that a step
    has a gradient.
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
    """`ours` is as near to `exact`, in fp64, as plain torch in the same dtype is, up to a factor of two."""
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
