"""Ranks: the processes of `torchrun -m zerokl train`, a mesh with named dimensions (torch's DeviceMesh).

What is spread along a dimension asks the Ranks of this dimension for rank and size, and sends through its
group. Without more, the mesh has one dimension. Along it, each rank has its own part of the prompts and of
the virtual shards (data_parallel.py). The gradient is the root of one tree (gradient.py) over the shards of
all ranks. The ranks' shards of a round are neighbours in this tree, and zero.py adds their sums in the tree's
order. Each rank updates its own slice of the weights and sends this slice to all ranks. With parallel.tensor
or parallel.context the ranks are a grid (dp, cp, tp), along whose last dimensions they share rows
(ulysses.py) and layers (tensor.py). With parallel.expert it is (dp, ep), and they share experts (expert.py).
Only rank 0 writes files.
"""

import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...processes.keeper import end_with

X = TypeVar("X")

# The data-parallel dimension of the mesh, along which virtual shards are spread; and those along which ranks
# share rows, layers and experts.
DATA_PARALLEL, CONTEXT_PARALLEL, TENSOR_PARALLEL, EXPERT_PARALLEL = "dp", "cp", "tp", "ep"
# dp x cp: the ranks that compute with the same weights.
REPLICAS = "replicas"


@dataclass(frozen=True)
class Ranks:
    """The ranks along one dimension of the mesh, as this process sees them.

    mesh: of this one dimension. A single rank has no mesh, and no process group. A method in which ranks
    wait for each other raises ChildProcessError when one of them has died.
    """

    mesh: DeviceMesh | None = None
    # Of a grid, by dimension: those with other virtual shards, those that share this one's rows (ulysses.py),
    # those that share its layers (tensor.py) or experts (expert.py), and its replicas.
    grid: "Mapping[str, Ranks]" = field(default_factory=dict)

    @property
    def data_parallel(self) -> "Ranks":
        """Those that have other virtual shards: all, without a grid."""
        return self.grid.get(DATA_PARALLEL, self)

    @property
    def tensor_parallel(self) -> "Ranks":
        """Those that share the layers with this one: it alone, without a grid."""
        return self.grid.get(TENSOR_PARALLEL, ALONE)

    @property
    def context_parallel(self) -> "Ranks":
        """Those that share the rows with this one: it alone, without a grid."""
        return self.grid.get(CONTEXT_PARALLEL, ALONE)

    @property
    def expert_parallel(self) -> "Ranks":
        """Those that share the experts with this one: it alone, without a grid."""
        return self.grid.get(EXPERT_PARALLEL, ALONE)

    @property
    def replicas(self) -> "Ranks":
        """Those that compute with the same weights as this one: all, without shared layers or experts."""
        if REPLICAS in self.grid:
            return self.grid[REPLICAS]
        return self if self.tensor_parallel.size == self.expert_parallel.size == 1 else self.data_parallel

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """What the ranks send through. A single rank has none."""
        assert self.mesh is not None, "a single rank sends nothing"
        return self.mesh.get_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with peers():
                dist.barrier(self.group)

    def send(self, tensor: torch.Tensor, receiver: int) -> None:
        """Send a tensor to a rank, which receives it."""
        with peers():
            dist.send(tensor, group=self.group, group_dst=receiver)

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Receive what a rank sends."""
        with peers():
            dist.recv(tensor, group=self.group, group_src=sender)

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        """Copy a rank's tensor into that of every other rank. All ranks must call this together."""
        with peers():
            dist.broadcast(tensor, group=self.group, group_src=sender)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x of every rank, in their order (kernels/leaves.py). All have one shape and dtype."""
        if self.size == 1 or not x.numel():
            return [x] * self.size
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with peers():  # as bytes: gloo does not know every dtype
            dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8), self.group)
        return parts

    def exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What every rank has for this one, in their order (kernels/leaves.py). All parts have one shape."""
        sent = torch.stack(parts)
        received = torch.empty_like(sent)
        with peers():  # as bytes, as above
            dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        return list(received)

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """The rows that every rank has for this one, rank after rank (kernels/leaves.py)."""
        rows, width = x.contiguous().view(torch.uint8), x.shape[1] * x.itemsize  # as bytes, as above
        incoming = rows.new_empty(sum(received), width)
        with peers():
            dist.all_to_all_single(incoming, rows, received, sent, group=self.group)
        return incoming.view(x.dtype)

    def gather(self, make: Callable[[], X]) -> list[X]:
        """The results of make() in every rank, in the order of the ranks.

        Where make() fails, all ranks raise the exception of the first rank that failed.
        """
        if self.size == 1:
            return [make()]
        try:
            outcome: tuple[bool, Any] = (True, make())
        except Exception as error:
            outcome = (False, error)
        outcomes: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(outcomes, outcome, self.group)
        for rank, (succeeded, value) in enumerate(outcomes):
            if not succeeded:
                raise (
                    ChildProcessError(f"{value} (of rank {rank})")
                    if isinstance(value, ChildProcessError)
                    else value
                )
        return [value for _, value in outcomes]

    def gather_tensors(self, make: Callable[[], Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The tensors that make() returns in every rank, in the order of the ranks; on the host.

        Only their shapes and dtypes are pickled. Where make() fails, all ranks raise as in `gather`.
        """
        local_tensors: list[torch.Tensor] = []

        def shapes() -> list[tuple[torch.Size, torch.dtype]]:
            local_tensors.extend(x.contiguous() for x in make())
            return [(x.shape, x.dtype) for x in local_tensors]

        gathered = self.gather(shapes)
        if self.size == 1:
            return [local_tensors]
        all_tensors = [
            [torch.empty(shape, dtype=dtype) for shape, dtype in rank_shapes] for rank_shapes in gathered
        ]
        all_tensors[self.rank] = local_tensors
        for sender, tensors in enumerate(all_tensors):
            for x in tensors:
                if x.numel():
                    self.broadcast(x.view(-1).view(torch.uint8), sender)  # gloo does not know every dtype
        return all_tensors

    def from_first(self, make: Callable[[], X]) -> X:
        """The result of make() in rank 0, returned in every rank; the other ranks do not call make."""
        return self.gather(make if self.first else lambda: None)[0]


ALONE = Ranks()


@contextmanager
def peers() -> Iterator[None]:
    """Turn the error of a collective operation into a ChildProcessError with one line that explains it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ChildProcessError(
            f"another rank has ended or does not answer ({reason}); torchrun names it and its exit code; "
            "`zerokl train --resume` goes on with the run, with any number of ranks"
        ) from None


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def _check_torchrun() -> None:
    """Raise ChildProcessError where torchrun has ended already, whose store the ranks would wait for."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10.0).close()
    except OSError as error:
        raise ChildProcessError(f"torchrun, which started this rank, has ended ({error})") from None


def _take_gpu() -> None:
    """Make the GPU of this rank's number on its machine the current one.

    Raises ValueError where the machine has fewer GPUs than ranks.
    """
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank >= gpus:
        raise ValueError(
            f"ranks: rank {rank} of this machine has no GPU, as it has {gpus}; start at most {gpus} ranks on "
            'it, or set device = "cpu"'
        )
    torch.cuda.set_device(rank)


@contextmanager
def join_ranks(
    on_gpu: bool = False, always: bool = False, sharing: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Ranks]:
    """The ranks among which torchrun started this process; one rank without torchrun.

    on_gpu: each rank computes on a GPU of its own. Raises ValueError where there are too few. always: a
    single rank too has a mesh, for FSDP. sharing: by dimension, how many ranks share layers, rows or
    experts; their product divides the ranks. The rules beside the settings say what goes with ranks.
    """
    size, backend = world_size(), "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if size == 1:
        with _alone(backend, on_gpu) if always else nullcontext(ALONE) as ranks:
            yield ranks
        return
    # A torchrun that is killed leaves its ranks behind, and they would wait for each other.
    end_with(os.getppid())
    _check_torchrun()
    if on_gpu:
        _take_gpu()
    _init(backend)
    with _mesh(size, on_gpu, sharing) as ranks:
        yield ranks


def _init(backend: str, **options: Any) -> None:
    """Make the process group (see dist.init_process_group)."""
    # Loaded later, its functions would hold the group as the default of an argument (see _mesh).
    import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, **options)


@contextmanager
def _mesh(size: int, on_gpu: bool, sharing: Mapping[str, int] = MappingProxyType({})) -> Iterator[Ranks]:
    """The ranks of the process group, which ends with this context.

    The group's destructor waits for the threads of gloo. One that lets go of a tensor while the interpreter
    ends aborts the process (pytorch#190489): a run that has succeeded would end with a code of -6. So nothing
    may keep the group.
    """
    try:
        device, grid = "cuda" if on_gpu else "cpu", {}
        meshes = [init_device_mesh(device, (size,), mesh_dim_names=(DATA_PARALLEL,))]
        cp, tp, ep = (sharing.get(name, 1) for name in (CONTEXT_PARALLEL, TENSOR_PARALLEL, EXPERT_PARALLEL))
        shapes = {}
        if ep > 1:
            shapes[DATA_PARALLEL, EXPERT_PARALLEL] = size // ep, ep
        elif cp * tp > 1:
            shapes[DATA_PARALLEL, CONTEXT_PARALLEL, TENSOR_PARALLEL] = size // (cp * tp), cp, tp
        if cp > 1 and tp > 1:
            shapes[REPLICAS, TENSOR_PARALLEL] = size // tp, tp
        for names, shape in shapes.items():
            meshes.append(init_device_mesh(device, shape, mesh_dim_names=names))
            grid |= {name: Ranks(meshes[-1][name]) for name in names}
        try:
            yield Ranks(meshes[0][DATA_PARALLEL], grid)
        finally:
            # DTensor's caches keep a mesh for good, and the mesh its groups. torch 2.11 has no such registry.
            for mesh in meshes:
                getattr(mesh, "_pg_registry", {}).clear()
    finally:
        dist.destroy_process_group()
        gc.collect()  # the modules of FSDP, which are cycles, keep it too


@contextmanager
def _alone(backend: str, on_gpu: bool) -> Iterator[Ranks]:
    """One rank with a process group of its own."""
    _init(backend, store=dist.HashStore(), rank=0, world_size=1)
    with _mesh(1, on_gpu) as ranks:
        yield ranks
