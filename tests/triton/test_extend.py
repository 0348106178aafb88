"""The kernel of docs/extend.md, interpreted, beside its reference."""

import pytest
import torch
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import DTYPES, randn, total_unequal


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples' modules lie on the path."""
    monkeypatch.syspath_prepend(str(PACKAGE_ROOT / "docs" / "examples"))


def results(
    width: int, dtype: torch.dtype, shift: float = 0.0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradient of the Triton kernels, and of the reference with its input shifted."""
    from relu2_mul import relu2_mul_bwd_ref, relu2_mul_ref
    from relu2_mul_triton import relu2_mul_bwd, relu2_mul_fwd

    gu, dy = randn(width, 5, 2 * width, dtype=dtype), randn(1, 5, width, dtype=dtype)
    gu[0, 0], gu[1, 0], gu[2, width] = -0.0, float("inf"), -0.0
    moved = gu + shift if shift else gu  # -0.0 + 0.0 is 0.0
    ours = [relu2_mul_fwd(gu), relu2_mul_bwd(dy, gu)]
    return [ours, [relu2_mul_ref(moved), relu2_mul_bwd_ref(dy, moved)]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 1500])
def test_the_triton_kernels_have_the_bits_of_the_reference(width, dtype):
    assert total_unequal(*results(width, dtype)) == 0


def test_control_another_input_is_found():
    assert total_unequal(*results(48, torch.float32, shift=1e-6)) > 0
