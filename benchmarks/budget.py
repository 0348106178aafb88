"""What the host does for a GPU, counted without a GPU: launches, descriptors, operations, uploads and waits.

    .venv-vllm/bin/python -m zerokl.benchmarks.budget                                     # prints the counts
    .venv-vllm/bin/python -m zerokl.benchmarks.budget --record tests/triton/budget.json   # and keeps them

The models have the real widths, in bf16, with a GPU's code and Hopper's tiles. Their tensors are on the meta
device, which has no memory: each launch is listed and none is carried out. Counts depend on the code only. So
a test compares them with the recorded ones (tests/triton/test_budget.py). Times are not here, because they
depend on the machine (host_cost.py measures them).
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor
from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.engine.config.loss_section import LossConfig
from zerokl.engine.rollout.decode import DecodeMemory, DecodeRows, Row
from zerokl.engine.rollout.types import DrawParams, RngKey, Rollout
from zerokl.engine.runs.compile_ahead import NoMemory
from zerokl.engine.train.losses.advantage import of_tokens
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.shard import Shard, ShardWork
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.matmul import UNPACKED
from zerokl.kernels.philox import Stream
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

Counts = dict[str, int]
VOCABULARY = 151936
TIED = {"0.6B": True, "8B": False}
# A pass: 4 shards, each of one prompt of 128 tokens with 8 completions of 256.
SHARDS, SAMPLES, PROMPT, COMPLETION = 4, 8, 128, 256
ROWS, PAGES = 64, 12  # of a decoding turn
GREEDY, TOP_P = SamplingParams(0.0), SamplingParams(0.7, 20, 0.9)
# Operations of torch that only make or name memory.
_MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "resize_")
# Operations of torch that the host waits for, wherever their result lies.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


class HostWork(NoMemory):
    """Counts torch's operations on the device, copies to it, and what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        from_device = any(x.is_meta for x in read)
        target = torch.device(kwargs.get("device") or "meta").type if name == "_to_copy" else None
        if from_device and (name in _WAITS or target == "cpu"):
            self.counts["waits"] += 1
            assert name == "_to_copy", f"{name} of a tensor on the device has no result without the device"
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not any(x.is_meta for x in [*read, *written]):
            return out
        if any(x.device.type == "cpu" and x.dim() for x in read):
            self.counts["uploads"] += 1
        elif not func.is_view and name not in _MEMORY:
            self.counts["operations"] += 1
        return out


@contextmanager
def _descriptors_made() -> Iterator[list[None]]:
    """One entry for each TMA descriptor that is made in this context."""
    made, check = [], TensorDescriptor.__post_init__

    def counted(self: TensorDescriptor) -> None:
        made.append(None)
        check(self)

    TensorDescriptor.__post_init__ = counted
    try:
        yield made
    finally:
        TensorDescriptor.__post_init__ = check


def counted(work: Callable[[], object]) -> Counts:
    """The counts of one call of `work`: the second, as the first may make what is kept."""
    for _ in range(2):
        with recorded_launches() as launches, _descriptors_made() as made, HostWork() as host:
            work()
    kernels = Counter(launch.kernel.__name__.strip("_") for launch in launches)
    given = sum(isinstance(x, TensorDescriptor) for launch in launches for x in launch.args)
    return {
        "launches": len(launches),
        "descriptors made": len(made),
        "descriptors given": given,
        **{name: host.counts[name] for name in ("operations", "uploads", "waits")},
        **{f"launches of {name}": n for name, n in sorted(kernels.items())},
    }


def decoder_of(name: str, layers: int = 0) -> Decoder:
    """A decoder of a shape of machine.SHAPES in bf16 on the meta device; layers: 0 is all."""
    config = shape_config(SHAPES[name], VOCABULARY, layers, TIED[name])
    layout = Layout(config)
    return Decoder(config, torch.zeros(layout.numel, dtype=torch.bfloat16, device="meta"), layout)


def _shard(prompt: int) -> Shard:
    rollouts = [
        Rollout.of_one_turn(
            prompt,
            sample,
            tuple([3 + prompt] * PROMPT),
            tuple([7] * COMPLETION),
            np.full(COMPLETION, -1.0, np.float32),
            "length",
            0,
        )
        for sample in range(SAMPLES)
    ]
    return Shard(
        rollouts,
        of_tokens(np.linspace(-1, 1, SAMPLES), [COMPLETION] * SAMPLES),
        np.full(SAMPLES, 1 / (SAMPLES * COMPLETION)),
    )


def training_pass(decoder: Decoder) -> Callable[[], object]:
    """Forward and backward of SHARDS shards in flight, whose prompts are read once."""
    sums = ShardSum(decoder, SHARDS, SHARDS)
    work = ShardWork(SamplingParams(), LossConfig(), SHARDS * SAMPLES)
    shards = [_shard(i) for i in range(SHARDS)]

    def run() -> None:
        sums._empty()
        work(decoder, shards, sums.buffers)

    return run


def decoding(decoder: Decoder, sampling_params: SamplingParams) -> DecodeRows:
    """ROWS rows that are ready for their turns."""
    memory = DecodeMemory(decoder, ROWS, PAGES, ROWS * PAGES)
    draw_params = DrawParams(sampling_params, frozenset({1, 2}))
    rows = DecodeRows(decoder, memory, draw_params, 0, Stream.SAMPLE)
    rows.start(UNPACKED)
    return rows


def _rows() -> list[Row]:
    return [Row(5, 200 + i, 0, 256, RngKey(0, 0, sample=i), range(PAGES)) for i in range(ROWS)]


def budget(name: str, layers: int = 0) -> dict[str, Counts]:
    """The counts of a pass, and of decoding: a turn, and what a look adds to its turns."""
    decoder = decoder_of(name, layers)
    with tiles_of_target("sm_90"):
        report = {"pass": counted(training_pass(decoder))}
        with torch.no_grad():
            turns = {
                "turn": SamplingParams(),
                "turn, greedy": GREEDY,
                "turn, top-k and top-p": TOP_P,
            }
            for what, sampling_params in turns.items():
                rows = decoding(decoder, sampling_params)
                report[what] = counted(lambda rows=rows: rows._turn(ROWS))
            rows = decoding(decoder, SamplingParams())
            report["new rows"] = counted(lambda: rows.load(_rows()))
            report["look"] = counted(lambda: rows._look(8).read())
    return report


def all_budgets() -> dict[str, dict[str, Counts]]:
    """By model, the counts of all its parts."""
    return {name: budget(name) for name in TIED}


def read_budget(path: Path) -> dict[str, dict[str, Counts]]:
    """The recorded counts."""
    return json.loads(path.read_text())


def rises(recorded: Mapping[str, Any], now: Mapping[str, Any], part: float) -> list[str]:
    """The counts that are more than `part` above the recorded ones, and what has no record, a line each."""
    differences = []
    for model, parts in now.items():
        for what, counts in parts.items():
            before = recorded.get(model, {}).get(what, {})
            for name, n in counts.items():
                if name not in before:
                    differences.append(f"{model}, {what}: {name} ({n}) is not recorded")
                elif n > before[name] * (1 + part):
                    differences.append(f"{model}, {what}: {name} ({n}), recorded {before[name]}")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    text = json.dumps(all_budgets(), indent=1)
    print(text)
    if options.record:
        options.record.write_text(text + "\n")


if __name__ == "__main__":
    main()
