"""Rules of binaries that a text shows; what compiles is tested in tests/triton."""

import pytest
from zerokl.verify.binaries import Binary, faults, pending_register_products

SHARED = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, p, 1, 1, 0, 0;\n"
REGISTERS = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1, %f2}, {%r1, %r2}, %rd2, p, 1, 1, 0;\n"


def wait(n: int) -> str:
    return f"wgmma.wait_group.sync.aligned {n};\n"


@pytest.mark.parametrize(
    ("ptx", "products"),
    [
        (SHARED + wait(1) + wait(0), 0),
        (REGISTERS + wait(0) + REGISTERS + wait(0), 0),
        (REGISTERS + wait(1) + REGISTERS + wait(0), 2),
        (SHARED + REGISTERS + wait(1), 1),
        ("add.f32 %f1, %f2, %f3;", 0),
    ],
)
def test_products_from_registers_that_are_left_pending_are_counted(ptx, products):
    assert pending_register_products(ptx) == products


def test_such_a_binary_is_a_fault():
    (line,) = faults([Binary("attention", "sm_90", 100, 0, 0, 0, 2)], None)
    assert line == "attention on sm_90: 2 products read registers while they are pending"
    assert faults([Binary("attention", "sm_90", 100, 0, 0, 0)], None) == []
