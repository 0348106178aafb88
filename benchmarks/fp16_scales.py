"""What a static loss scale does to the bits: the gradient of one step at every power of two, in each dtype.

    python benchmarks/fp16_scales.py runs/demo/base          (the model of `make demo`; minutes)

For each scale 2^k, of the demo's first step (32 prompts x 8 samples of the task add, drawn by the model in
that dtype):

    differ     elements of the weights' gradient, divided by the scale, whose bits are not those at 2^(k+1)
    subnormal  elements of an activation's gradient, as rounded to the compute dtype, that have fewer bits than a normal number
    lost       such elements that are zero here and not at every scale
    overflow   such elements that are infinite or NaN

Activations: the output of every operation that Decoder.hidden and Decoder.read hook. The logits' gradient is
rounded, too, but not counted here; with head_dtype = "float32" it is not rounded at all.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from zerokl.engine.config import Config
from zerokl.engine.config_file import load_config
from zerokl.engine.loss.advantage import advantages
from zerokl.engine.loss.policy_loss import policy_loss, sequence_weights
from zerokl.engine.parallel.gradient import ShardSum
from zerokl.engine.runs.setup import make_state
from zerokl.engine.tasks import load_task
from zerokl.engine.tasks.perfectible import task_of
from zerokl.engine.train.collect import collect
from zerokl.engine.train.shard import Shard
from zerokl.model.decoder import Decoder
from zerokl.model.prompts import Prompts, prompt_passes
from zerokl.model.scoring import logprobs, pack
from zerokl.verify.bitwise import count_unequal

SCALES = range(25)


@dataclass
class Scale:
    """What was counted at one scale, by operation, and the weights' gradient divided by the scale."""

    gradient: torch.Tensor
    subnormal: Counter = field(default_factory=Counter)
    zero: Counter = field(default_factory=Counter)
    overflow: Counter = field(default_factory=Counter)
    lost: int = 0
    differ: int | None = None  # from the next scale; None at the last


class Step:
    """One step's shards, differentiated at any scale."""

    def __init__(self, config: Config, model: Path):
        state = make_state(config, model, load_task(config.task.name, config.task.options))
        try:
            batch = collect(state)
        finally:
            state.close()
        self.config, self.loss, self.decoder = config, config.loss.resolve(), state.policy
        weights = sequence_weights(
            [len(r.completion_ids) for r in batch.rollouts],
            self.loss.loss_agg_mode,
            config.sampling.max_tokens,
        )
        A = advantages(batch.rewards, self.loss.advantage)
        self.shards = Shard(batch.rollouts, A.reshape(-1), np.array(weights)).cut(config.virtual_shards)
        self.nonzero: dict[
            tuple[int, int, str, str], torch.Tensor
        ] = {}  # elements that were not zero at some scale

    def at(self, k: int) -> Scale:
        """The gradient of the loss times 2^k."""
        done = Scale(torch.empty(0))
        total = ShardSum(self.decoder, len(self.shards))
        for s, shard in enumerate(self.shards):
            total.add(partial(self._backward, done, s, 2.0**k), shard)
        done.gradient = total.tree.take().clone() / 2.0**k
        return done

    def _backward(self, done: Scale, s: int, scale: float, decoder: Decoder, shard: Shard) -> None:
        for at in prompt_passes([r.prompt_ids for r in shard.rollouts]):
            part = shard.part(at)
            hooks = [partial(self._listen, done, (s, at.start, of)) for of in ("prompts", "completions")]
            prompts = Prompts(decoder, [r.prompt_ids for r in part.rollouts], hooks[0])
            packed = pack([r.pair for r in part.rollouts], prompts.of)
            each = torch.tensor(packed.completion_lengths)
            logp, _ = logprobs(decoder, packed, self.config.sampling.sampling_params, hooks[1], prompts)
            sampler = torch.from_numpy(np.concatenate([r.logprobs for r in part.rollouts]))
            A, w = (
                torch.from_numpy(x).float().repeat_interleave(each) for x in (part.advantages, part.weights)
            )
            loss = policy_loss(logp, logp.detach(), sampler, A, packed.completion_lengths, self.loss) * w
            (loss.sum() * scale).backward()
            prompts.backward()

    def _listen(self, done: Scale, where: tuple[int, int, str], name: str, x: torch.Tensor) -> None:
        x.register_hook(lambda dx: self._count(done, (*where, name), dx))

    def _count(self, done: Scale, key: tuple[int, int, str, str], dx: torch.Tensor | None) -> None:
        if dx is None:  # the last layer's residual, which only its norm reads
            return
        size, op = dx.abs(), key[-1]
        finite, zero = torch.isfinite(dx), dx == 0
        done.subnormal[op] += int(((size < torch.finfo(dx.dtype).tiny) & ~zero).sum())
        done.zero[op] += int(zero.sum())
        done.overflow[op] += int((~finite).sum())
        some = finite & ~zero
        self.nonzero[key] = self.nonzero[key] | some if key in self.nonzero else some


def measure(config: Config, model: Path, scales: Sequence[int] = SCALES) -> tuple[list[Scale], int]:
    """The counts at each scale, and how many elements the gradients of all activations have."""
    step = Step(config, model)
    done = [step.at(k) for k in scales]
    elements = sum(x.numel() for x in step.nonzero.values())
    never = elements - sum(int(x.sum()) for x in step.nonzero.values())
    for here, after in zip(done, [*done[1:], None], strict=True):
        here.lost = sum(here.zero.values()) - never
        here.differ = None if after is None else count_unequal(here.gradient, after.gradient)
    return done, elements


def table(done: Sequence[Scale], elements: int, scales: Sequence[int]) -> str:
    """Markdown, neighbouring scales with equal counts in one line."""
    rows = [(s.differ, sum(s.subnormal.values()), s.lost, sum(s.overflow.values())) for s in done]
    lines = [
        f"of {done[0].gradient.numel()} and {elements} elements:\n",
        "| scale | differ | subnormal | lost | overflow |",
    ]
    lines += ["|---|---|---|---|---|"]
    first = 0
    for i, row in enumerate(rows):
        if i + 1 < len(rows) and rows[i + 1][1:] == row[1:] and rows[i + 1][0] in (row[0], None):
            rows[i + 1] = row  # the last has no next one to differ from
            continue
        name = f"2^{scales[first]}" + (f" to 2^{scales[i]}" if i > first else "")
        lines.append(f"| {name} | " + " | ".join("" if x is None else f"{x}" for x in row) + " |")
        first = i + 1
    return "\n".join(lines)


def run_config(model: str, dtype: str, head: str) -> Config:
    """The demo's step on a model."""
    found = task_of(Path(model))
    options = {} if found is None else {f"task.options.{k}": v for k, v in found["options"].items()}
    values = {
        "model": model,
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
    parser.add_argument("model", help="model folder that `make demo` or `zerokl init` made")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype, head in (
        ("float16", "compute"),
        ("float16", "float32"),
        ("bfloat16", "compute"),
        ("float32", "compute"),
    ):
        done, elements = measure(run_config(args.model, dtype, head), Path(args.model))
        print(f"\n### {dtype}, head_dtype = {head}\n\n{table(done, elements, SCALES)}", flush=True)
        clean = [i for i, s in enumerate(done) if not s.overflow.total()]
        if clean and done[clean[-1]].subnormal.total():
            most = done[clean[-1]].subnormal.most_common(5)
            print(
                f"\nsubnormal at 2^{SCALES[clean[-1]]}, the largest scale without overflow: "
                + ", ".join(f"{n} {c}" for n, c in most)
            )


if __name__ == "__main__":
    main()
