"""How fast a step was: tokens a second, the share of the GPU's peak rate (MFU), and memory.

The floating-point operations of the trainer's forward and backward, as PaLM counts them (arXiv:2204.02311,
appendix B), but with the pairs that a causal mask leaves:

    flops = 6 N T + 6 V D C + 12 L H D' S          2, 2 and 4 in place of 6, 6 and 12 for a forward alone
    MFU   = flops of all updates / (seconds of forward and backward x peak rate x ranks)

N weights of the layers' matrices, T tokens that go through the layers, V vocabulary, D hidden size, C tokens
with logits, L layers, H query heads, D' width of a head, S pairs of a token and a key that it sees.

It counts the work that the step needs, not the work that is done: a prompt once for its samples, and nothing
that the backward computes again. A sequence without a gradient counts its forward only. Frozen weights count
as if they were trained.
"""

import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from ...files.inputs import read_text
from ...model.config import ModelConfig
from ...model.operation import Work
from ...model.operations import forward_flops
from ...model.prompts import first_of_prompt
from ..config.loss_section import LossConfig
from .shard import Shard, has_gradient
from .state import TrainState

# Part of the device's name -> dense TFLOP/s in bf16 and fp16, and in fp32 on the units that multiply whole
# fp32 numbers (our kernels use no TF32). The first part that the name contains counts. From the makers' data
# sheets, which docs/metrics.md lists; None where a sheet is silent.
PEAK_TFLOPS: dict[str, tuple[float, float | None]] = {
    "A100": (312.0, 19.5),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 67.0),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.4, 67.0),  # and GH200
    "GB200": (2500.0, None),
    "B200": (2250.0, None),
    "MI300X": (1307.4, 163.4),
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The peak rate of a device in FLOP/s; None where the table does not know it."""
    for part, (tflops_16_bit, tflops_fp32) in PEAK_TFLOPS.items():
        if part in device_name:
            tflops = tflops_fp32 if dtype == torch.float32 else tflops_16_bit
            return None if tflops is None else 1e12 * tflops
    return None


def training_flops(config: ModelConfig, sequences: Iterable[tuple[int, int, int, bool, bool]]) -> float:
    """Floating-point operations of one forward and backward.

    sequences: of each, the tokens of its prompt, of its completion, and the drawn ones of these, whether it
    is the first of its prompt, and whether it has a gradient.
    """
    work = {
        True: [0, 0, 0],
        False: [0, 0, 0],
    }  # with and without a gradient: operations grow with each number
    for prompt, completion, drawn, first, is_trained in sequences:
        # A sample begins with the prompt's last token (model/prompts.py), so it has `completion` rows.
        tokens, pairs = completion, completion * prompt + completion * (completion - 1) // 2
        if first:
            tokens, pairs = tokens + prompt - 1, pairs + prompt * (prompt - 1) // 2
        work[is_trained] = [a + b for a, b in zip(work[is_trained], (tokens, pairs, drawn), strict=True)]
    trained, forward_only = (forward_flops(config, Work(*work[has])) for has in (True, False))
    return 3.0 * trained + forward_only


def performance(state: TrainState, shard: Shard, times: dict[str, float]) -> dict[str, float]:
    """The metrics perf/* and pool/* of a step. shard: the whole step. times: its metrics time/*."""
    tokens = sum(len(rollout.logprobs) for rollout in shard.rollouts)
    step_s, device = times["time/sample_s"] + times["time/train_s"], state.policy.device
    metrics = {"perf/tokens_per_s": tokens / step_s, "perf/peak_memory_bytes": peak_memory_bytes(device)}
    if (at_once := state.sampler.samples_at_once) is not None:
        metrics["perf/samples_at_once"] = float(at_once)
    metrics |= _speculation(state.stopwatch.counts)
    if state.ahead is not None:
        metrics |= state.ahead.metrics(step_s)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak, training_s = peak_flops(name, state.policy.dtype), times.get("time/forward_backward_s")
    if peak is not None and training_s is not None:
        flops = training_flops(state.policy.config, _sequences(shard, state.config.loss))
        updates, ranks = state.config.updates_per_rollout, state.ranks.size
        metrics["perf/mfu"] = flops * updates / (training_s * peak * ranks)
    return metrics


def _speculation(counts: Counter[str]) -> dict[str, float]:
    """What became of guessed tokens (rollout/speculation.py), in this process. counts: see Generation."""
    if not counts["tokens"]:
        return {}
    metrics = {"perf/tokens_per_turn": counts["tokens"] / (counts["tokens"] - counts["guesses_drawn"])}
    if counts["guesses"]:
        metrics["perf/guesses_drawn"] = counts["guesses_drawn"] / counts["guesses"]
    return metrics


def _sequences(shard: Shard, loss: LossConfig) -> Iterator[tuple[int, int, int, bool, bool]]:
    """What training_flops asks for. loss: resolved."""
    firsts = first_of_prompt([rollout.prompt_ids for rollout in shard.rollouts])
    for i, (rollout, first) in enumerate(zip(shard.rollouts, firsts, strict=True)):
        drawn, is_trained = len(rollout.logprobs), has_gradient(shard.part(slice(i, i + 1)), loss)
        yield len(rollout.prompt_ids), len(rollout.completion_ids), drawn, first, is_trained


def peak_memory_bytes(device: torch.device) -> float:
    """The most memory that this process has held at once so far.

    On a GPU it is what torch had allocated there; on a CPU it is what was in RAM.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # On Linux getrusage also counts what the process that started this one once held.
    status = read_text("/proc/self/status") if sys.platform == "linux" else ""
    if "VmHWM:" in status:  # not every sandbox writes it
        return 1024.0 * int(status.split("VmHWM:")[1].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
