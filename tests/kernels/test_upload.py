"""What goes to a device together goes by one copy from pinned memory, and arrives as it was."""

import pytest
import torch
from zerokl.files.bitwise import equal
from zerokl.kernels import upload as upload_module
from zerokl.kernels.attention import varlen_plan
from zerokl.kernels.order import token_blocks
from zerokl.kernels.upload import upload, upload_tables

GPU = torch.device("cuda", 0)


@pytest.fixture
def copies(monkeypatch) -> list[dict]:
    """A GPU is pretended: the arguments of each copy to it. What arrives lies on the CPU."""
    copied, empty, to = [], torch.empty, torch.Tensor.to

    def pinned(*args, pin_memory=False, **options):
        x = empty(*args, **options)
        x.was_pinned = pin_memory
        return x

    def copy(x, target=None, *args, **options):
        if target != GPU:
            return to(x, target, *args, **options)
        copied.append({"pinned": getattr(x, "was_pinned", False), **options})
        return x.clone()

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    return copied


TENSORS = [
    torch.arange(7),
    torch.arange(3, dtype=torch.int32),
    torch.zeros(0, 4, dtype=torch.int32),
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t(),
    torch.tensor(True),
    torch.arange(5, dtype=torch.int32).view(5, 1),
]


def test_tensors_arrive_by_one_pinned_copy_that_nobody_waits_for(copies):
    arrived = upload(GPU, *TENSORS)
    assert copies == [{"pinned": True, "non_blocking": True}]
    for x, y in zip(TENSORS, arrived, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert equal(x, y)
        assert y.storage_offset() * y.element_size() % 16 == 0, "Triton would compile another binary"


def test_control_tensors_side_by_side_lie_at_other_places(copies, monkeypatch):
    monkeypatch.setattr(upload_module, "_ALIGN", 4)
    arrived = upload(GPU, torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32))
    assert arrived[1].storage_offset() * 4 % 16


def test_on_a_cpu_nothing_is_copied(copies):
    assert all(x is y for x, y in zip(TENSORS, upload(torch.device("cpu"), *TENSORS), strict=True))
    assert copies == []


def test_what_is_on_the_device_stays_there(copies):
    there = torch.empty(3, device="meta")
    assert upload(GPU, there)[0] is there
    assert copies == []
    first, second = upload(GPU, there, torch.arange(2))
    assert (first is there, second.tolist(), len(copies)) == (True, [0, 1], 1)


def test_tables_arrive_with_the_tensors(copies):
    """Token blocks of three shards and the plan of an attention: the tables of a CPU, and no other copy."""
    lengths, shards = [130, 7, 300], [0, 1, 4]
    blocks, plan = token_blocks(lengths, shards), varlen_plan(lengths, 4, 2)
    (ids,) = upload_tables(GPU, [blocks, plan], torch.arange(9))
    assert ids.tolist() == list(range(9))
    cpu = torch.device("cpu")
    for table in ("shards", "first", "rows"):
        assert equal(getattr(blocks.on(GPU), table), getattr(blocks.on(cpu), table))
    for x, y in zip(plan.on(GPU), plan.on(cpu), strict=True):
        assert equal(x, y) if isinstance(x, torch.Tensor) else x == y
    assert len(copies) == 1
    token_blocks(lengths).on(GPU)  # control: tables that did not go along need a copy of their own
    assert len(copies) == 2
