"""What a static loss scale does to the bits: the gradient of one step at every power of two, in each dtype.

    python benchmarks/fp16_scales.py runs/half          (docs/fp16-loss-scales.md says how it is made)

The step is the demo's first one, of the model's perfectible set: 32 prompts x 8 samples of the task add,
drawn by the model in that dtype.
At each scale 2^k it counts elements of the weights' gradient, divided by the scale,

    differ     whose bits are not those at 2^(k+1)

and elements of the activations' gradients, as rounded to the compute dtype,

    subnormal  that have fewer bits than a normal number
    lost       that are zero at this scale, but not at every scale
    overflow   that are infinite or NaN

Activations are the outputs of all operations that Decoder.hidden and Decoder.read hook. The logits' gradient
is rounded, too, but it is not counted. With head_dtype = "float32" it is not rounded at all.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.setup import make_state
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.perfectible import task_of
from zerokl.engine.tasks.rewards import open_reward
from zerokl.engine.train.collect import collect
from zerokl.engine.train.losses.policy_loss import policy_loss
from zerokl.engine.train.parallel.gradient import ShardSum
from zerokl.engine.train.prepare import prepare
from zerokl.engine.train.shard import Shard
from zerokl.files.bitwise import count_unequal
from zerokl.model.context import Buffers
from zerokl.model.decoder import Decoder
from zerokl.model.prompts import Prompts, prompt_passes
from zerokl.model.scoring import logprobs, pack
from zerokl.pages.markdown import table as markdown_table

SCALES = range(25)


@dataclass
class Scale:
    """The weights' gradient divided by the scale, and the counts at one scale, most of them by operation."""

    gradient: torch.Tensor
    subnormal: Counter = field(default_factory=Counter)
    zero: Counter = field(default_factory=Counter)
    overflow: Counter = field(default_factory=Counter)
    lost: int = 0
    differ: int | None = None  # None at the last scale, which has no next one


class Step:
    """The shards of one step, which can be differentiated at any scale."""

    def __init__(self, config: Config, model: Path):
        task = load_task(config.task.name, config.task.options)
        with (
            open_reward(task, config.task.reward_settings) as reward,
            closing(make_state(config, model, task, reward)) as state,
        ):
            self.shards = prepare(state, collect(state)).shard.cut(config.virtual_shards)
        self.config, self.loss, self.decoder = config, config.loss, state.policy
        # Elements that were not zero at some scale, by place (see _backward) and operation.
        self.nonzero: dict[tuple[int, int, str, str], torch.Tensor] = {}

    def at(self, k: int) -> Scale:
        """The gradient of the loss times 2^k."""
        counts = Scale(torch.empty(0))
        total = ShardSum(self.decoder, len(self.shards))
        for s, shard in enumerate(self.shards):
            total.add(partial(self._backward, counts, s, 2.0**k), [shard])
        counts.gradient = total.tree.take().clone() / 2.0**k
        return counts

    def _backward(
        self,
        counts: Scale,
        s: int,
        scale: float,
        decoder: Decoder,
        shards: Sequence[Shard],
        buffers: Buffers,
    ) -> list[None]:
        """The backward pass of shard s. A place is (s, first sample of a pass, prompts or completions)."""
        (shard,) = shards
        for pass_slice in prompt_passes([r.prompt_ids for r in shard.rollouts]):
            part = shard.part(pass_slice)
            hooks = [
                partial(self._listen, counts, (s, pass_slice.start, side))
                for side in ("prompts", "completions")
            ]
            prompt_ids = [r.prompt_ids for r in part.rollouts]
            prompts = Prompts(decoder, prompt_ids, hooks[0], buffers=buffers)
            packed = pack([r.pair for r in part.rollouts], prompts.prompt_of_sample)
            lengths = torch.tensor(packed.drawn_lengths)
            logp, _ = logprobs(decoder, packed, self.config.sampling.sampling_params, hooks[1], prompts)
            sampling_logprobs = torch.from_numpy(np.concatenate([r.logprobs for r in part.rollouts]))
            A = torch.from_numpy(np.concatenate(part.advantages)).float()
            w = torch.from_numpy(part.weights).float().repeat_interleave(lengths)
            loss = policy_loss(logp, logp.detach(), sampling_logprobs, A, packed.drawn_lengths, self.loss)
            ((loss * w).sum() * scale).backward()
            prompts.backward()
        return [None]

    def _listen(self, counts: Scale, place: tuple[int, int, str], op: str, x: torch.Tensor) -> None:
        x.register_hook(lambda dx: self._count(counts, (*place, op), dx))

    def _count(self, counts: Scale, key: tuple[int, int, str, str], dx: torch.Tensor | None) -> None:
        if dx is None:  # the last layer's residual has no gradient: only its norm reads it
            return
        size, op = dx.abs(), key[-1]
        finite, zero = torch.isfinite(dx), dx == 0
        counts.subnormal[op] += int(((size < torch.finfo(dx.dtype).tiny) & ~zero).sum())
        counts.zero[op] += int(zero.sum())
        counts.overflow[op] += int((~finite).sum())
        nonzero = finite & ~zero
        self.nonzero[key] = self.nonzero[key] | nonzero if key in self.nonzero else nonzero


def measure(config: Config, model: Path, scales: Sequence[int] = SCALES) -> tuple[list[Scale], int]:
    """The counts at each scale, and how many elements the gradients of all activations have."""
    step = Step(config, model)
    counts = [step.at(k) for k in scales]
    elements = sum(x.numel() for x in step.nonzero.values())
    always_zero = elements - sum(int(x.sum()) for x in step.nonzero.values())
    for scale, next_scale in zip(counts, [*counts[1:], None], strict=True):
        scale.lost = sum(scale.zero.values()) - always_zero
        if next_scale is not None:
            scale.differ = count_unequal(scale.gradient, next_scale.gradient)
    return counts, elements


def table(counts: Sequence[Scale], elements: int, scales: Sequence[int]) -> str:
    """The counts in Markdown. Neighbouring scales with equal counts share a line."""
    rows = [(s.differ, sum(s.subnormal.values()), s.lost, sum(s.overflow.values())) for s in counts]
    lines = []
    first = 0
    for i, row in enumerate(rows):
        if i + 1 < len(rows) and rows[i + 1][1:] == row[1:] and rows[i + 1][0] in (row[0], None):
            rows[i + 1] = row  # the last scale has no next one to differ from: it takes this row's number
            continue
        name = f"2^{scales[first]}" + (f" to 2^{scales[i]}" if i > first else "")
        lines.append([name, *("" if x is None else f"{x}" for x in row)])
        first = i + 1
    headings = ("scale", "differ", "subnormal", "lost", "overflow")
    totals = f"of {counts[0].gradient.numel()} and {elements} elements:"
    return f"{totals}\n\n{markdown_table(headings, lines)}"


def run_config(model: str, dtype: str, head: str) -> Config:
    """The configuration of the demo's step on a model."""
    task = task_of(Path(model))
    options = {} if task is None else {f"task.options.{k}": v for k, v in task["options"].items()}
    values = {
        "model": model,
        "task.perfectible_only": "true",
        "dtype": dtype,
        "precision.head_dtype": head,
        "workers": "1",
        "evaluation.every": "0",
    }
    return load_config(None, "demo", values | options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder that `zerokl init` made")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype, head in (
        ("float16", "compute"),
        ("float16", "float32"),
        ("bfloat16", "compute"),
        ("float32", "compute"),
    ):
        counts, elements = measure(run_config(args.model, dtype, head), Path(args.model))
        print(f"\n### {dtype}, head_dtype = {head}\n\n{table(counts, elements, SCALES)}", flush=True)
        clean = [i for i, s in enumerate(counts) if not s.overflow.total()]
        if clean and counts[clean[-1]].subnormal.total():
            most = counts[clean[-1]].subnormal.most_common(5)
            print(
                f"\nsubnormal at 2^{SCALES[clean[-1]]}, the largest scale without overflow: "
                + ", ".join(f"{n} {c}" for n, c in most)
            )


if __name__ == "__main__":
    main()
