"""TRL's asynchronous GRPO with a lag that is known, and without a mismatch: zerokl draws and scores.

    from zerokl.integrations.exact_async_trl import ExactAsyncGRPOTrainer as AsyncGRPOTrainer

TRL's trainer takes its rollouts from a worker and hands its weights to a transfer; both are arguments. Here a
thread of this process draws, with a copy of the weights, while the trainer trains. A batch is drawn with the
weights of `lag` updates before the step that trains on it; the first ones with the first weights. So the lag
is a number of the settings, and no race of a server and a trainer. What is drawn depends on the seed, the
step and the place in the batch.

Each drawn token's log-probability is compared, bit for bit, with the trainer's function of the weights that
drew it. TRL's ratio is then of the policies alone: exactly 1 where the lag is 0, and at any lag what the
updates between have changed.

TRL packs completions of a step into a tree, where a prefix that they share stands once. The forward here
takes the tree apart again, because zerokl's kernels read whole sequences.
"""

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from transformers import PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import (
    RolloutGroup,
    RolloutSample,
    TrainingSequence,
    _AsyncRolloutLoop,
)

from ..engine.rollout.native import NativeSampler
from ..engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from ..engine.train.monitor import Monitor
from ..kernels.sampling_params import WHY_NO_PENALTY, SamplingParams
from ..model.labels import UNLABELLED
from .transformers import ExactModel, ExactOutput

SUPPORTED = ("1.16.0",)
RewardFuncs = Callable | list[Callable] | None

# Settings that would change what is drawn or scored, or when, each with the values that ask for nothing.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "token_budget": ((0,), "a step must have a fixed number of completions; set token_budget=0"),
    "weight_sync_steps": ((1,), "each update has a batch that is drawn with its weights"),
    "repetition_penalty": ((None, 1.0), WHY_NO_PENALTY),
    "torch_compile": ((False,), "a compiled forward is not the kernels'"),
    "deepspeed": ((None,), "the kernels read whole Parameters"),
    "fsdp": ((None, "", [], False), "the kernels read whole Parameters"),
}
_REFUSED_ARGUMENTS = {
    "peft_config": "PEFT adapters are not supported; zerokl's own trainer has LoRA (lora.rank)",
    "tools": "conversations of several turns are not supported; zerokl's own trainer has environments",
    "environment_factory": "conversations of several turns are not supported",
    "rollout_worker": "zerokl's sampler draws",
    "weight_transfer": "zerokl's sampler copies the weights in this process",
}


class ExactAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer with a known lag. Its arguments are TRL's, and they have names.

    lag: updates by which the weights that draw are older than those that are trained, 1 at least; the first
    steps have fewer. policy: what scores. drawing: the copy of the weights that draws. worker: draws with it.

    Raises ValueError for a release of TRL that is not supported, and for each setting that cannot be exact,
    by name. While it trains it raises MismatchError (engine/train/monitor.py).
    """

    def __init__(
        self, model: str, reward_funcs: RewardFuncs = None, *arguments: Any, lag: int = 1, **named: Any
    ):
        if trl.__version__ not in SUPPORTED:
            raise ValueError(
                f"exact_async_trl: TRL {trl.__version__} is not supported; supported are "
                f"{', '.join(SUPPORTED)}"
            )
        for name, reason in _REFUSED_ARGUMENTS.items():
            if named.get(name):
                raise ValueError(f"exact_async_trl: {name} is refused: {reason}")
        listed = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        self.worker = _Worker(self, listed, lag)
        named |= {"rollout_worker": self.worker, "weight_transfer": _NoTransfer()}
        super().__init__(model, listed, *arguments, **named)
        _refuse(self, lag)
        args = self.args
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        sampling_params = SamplingParams(
            args.temperature, max(0, args.top_k or 0), args.top_p, args.min_p or 0.0
        )
        policy = self.accelerator.unwrap_model(self.model)
        self.policy = ExactModel(policy, dtype, sampling_params, args.gradient_checkpointing)
        self.drawing = ExactModel(policy, dtype, sampling_params, recompute=False)
        _score_with(policy, self.policy)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """TRL's. It begins at the first step."""
        if resume_from_checkpoint:
            raise ValueError(
                "exact_async_trl: resume_from_checkpoint is refused: the first batches would be drawn with "
                "other weights than without the stop"
            )
        return super().train(None, *arguments, **named)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *arguments: Any, **named: Any) -> Any:
        """TRL's loss. It also logs the lag of the batch, `sample/lag`, in updates."""
        lag = self.model_version - self.worker.version_of(self.state.global_step)
        self._metrics["train"]["sample/lag"].append(float(lag))
        return super().compute_loss(model, inputs, *arguments, **named)


def _refuse(trainer: Any, lag: int) -> None:
    """Raise ValueError for a setting that changes what is drawn or scored, or when."""
    args = trainer.args
    for name, (off, reason) in _REFUSED.items():
        value = getattr(args, name, off[0])
        if value not in off:
            raise ValueError(f"exact_async_trl: {name} ({value!r}) is refused: {reason}")
    if args.temperature == 0.0:
        raise ValueError("exact_async_trl: temperature (0.0) is refused: TRL trains on draws; set it above 0")
    if not 1 <= lag <= args.max_staleness:
        raise ValueError(
            f"exact_async_trl: lag ({lag}) must lie in 1 to max_staleness ({args.max_staleness}): TRL asks "
            "for the next batch before it has updated"
        )
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError("exact_async_trl: an IterableDataset is refused: prompts are chosen by their place")
    if trainer.accelerator.device.type != "cpu":
        raise ValueError(
            f"exact_async_trl: device ({trainer.accelerator.device}) is refused: a thread that captures "
            "graphs would disturb the trainer's launches on a GPU; set use_cpu=True"
        )
    if trainer.accelerator.num_processes > 1:
        raise ValueError("exact_async_trl: several processes are refused: one draws for all of its batches")
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if completions % args.num_generations:
        raise ValueError(
            f"exact_async_trl: the {completions} completions of a step must be whole groups of "
            f"num_generations ({args.num_generations})"
        )
    if trainer.aux_loss_enabled:
        raise ValueError(
            "exact_async_trl: router_aux_loss_coef is refused: the kernels have no auxiliary loss; set it "
            "to 0.0"
        )


# --- scoring ---


def _score_with(model: PreTrainedModel, policy: ExactModel) -> None:
    """Let the forward that TRL's loss calls, `fused_lm_head=True`, be the kernels'."""
    own_forward = model.forward

    def forward(self: PreTrainedModel, *arguments: Any, fused_lm_head: bool = False, **named: Any) -> Any:
        if not fused_lm_head:
            return own_forward(*arguments, **named)
        return _score_tree(policy, named)

    model.forward = MethodType(forward, model)


def _score_tree(policy: ExactModel, packed: dict[str, torch.Tensor]) -> ExactOutput:
    """log_probs and entropy [1, N] of a row that TRL has packed (TreeRow.pack), 0 without a label.

    A position that several completions share is scored in the first of them.
    """
    ids, labels = packed["input_ids"][0], packed["shift_labels"][0]
    paths = list(_leaf_paths(packed))
    shape = len(paths), max(map(len, paths))
    rows, mask, row_labels = ids.new_zeros(shape), ids.new_zeros(shape), ids.new_full(shape, UNLABELLED)
    taken = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    places = []  # of each label: in the row, and in the tree
    for i, path in enumerate(paths):
        rows[i, : len(path)], mask[i, : len(path)] = ids[path], 1
        new = path[:-1][(labels[path[:-1]] != UNLABELLED) & ~taken[path[:-1]]]
        depth = torch.nonzero(torch.isin(path, new)).flatten()
        row_labels[i, depth + 1] = labels[new]
        taken[new] = True
        places.append((depth + i * (shape[1] - 1), new))
    scored = policy.score(rows, mask, row_labels)
    source, target = (torch.cat(part) for part in zip(*places, strict=True))
    zeros = torch.zeros(len(ids), device=ids.device)
    return ExactOutput(
        *(zeros.index_put((target,), x.flatten()[source])[None] for x in (scored.log_probs, scored.entropy))
    )


def _leaf_paths(packed: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The positions of each completion's tokens, from the root of the tree to a leaf.

    A segment's path ends with the segment. It is no leaf where the next one's path begins with it: segments
    stand in the order of a walk through the tree.
    """
    ends = packed["tree_cu_seqlens_k"].tolist()
    paths = [packed["tree_kv_index"][a:b].long() for a, b in pairwise(ends)]
    for path, after in zip(paths, [*paths[1:], None], strict=True):
        if after is None or len(after) <= len(path) or not torch.equal(after[: len(path)], path):
            yield path


# --- drawing ---


class _NoTransfer:
    """TRL's WeightTransferProtocol: the sampler reads the Parameters of this process."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class _Worker:
    """TRL's RolloutWorkerProtocol: draws a batch for each update, in a thread, `lag` steps ahead."""

    def __init__(self, trainer: ExactAsyncGRPOTrainer, reward_funcs: list[Callable], lag: int):
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict] = queue.Queue()
        self._trainer, self._reward_funcs, self._lag = trainer, reward_funcs, lag
        self._thread = ThreadPoolExecutor(1)
        self._drawing: list[Future] = []
        self._versions: dict[int, int] = {}  # of the weights that a batch was drawn with, by its step

    def version_of(self, step: int) -> int:
        """The version of the weights that the batch of a step was drawn with."""
        return self._versions[step]

    def start(self) -> None:
        """Draw the first batches, which all have the first weights."""
        first = self._trainer.state.global_step
        self._trainer.drawing.sync()
        for step in range(first, first + self._lag + 1):
            self._begin(step)

    def update_model_version(self, model_version: int) -> None:
        """Draw the batch that is trained `lag` steps from now, with the weights as they are."""
        if not self._versions:
            return  # the first version, before the start
        for future in self._drawing:
            future.result()  # the copy is read until then
        self._drawing.clear()
        self._trainer.drawing.sync()
        self._begin(max(self._versions) + 1)

    def check_health(self, stale_after_s: float) -> None:
        """Raise what the thread has raised. TRL asks while it waits for a completion."""
        for future in self._drawing:
            if future.done():
                future.result()

    def stop(self) -> None:
        """Wait for the thread's end."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, step: int) -> None:
        self._versions[step] = self._trainer.model_version
        self._drawing.append(self._thread.submit(self._draw, step, self._trainer.model_version))

    @torch.no_grad()
    def _draw(self, step: int, version: int) -> None:
        trainer, args = self._trainer, self._trainer.args
        G = args.num_generations
        groups = args.per_device_train_batch_size * args.gradient_accumulation_steps // G
        rows = [
            trainer.train_dataset[(step * groups + p) % len(trainer.train_dataset)] for p in range(groups)
        ]
        prompts = [_prompt_ids(trainer, row["prompt"]) for row in rows]
        sampling_params, stop_ids = trainer.drawing.sampling_params, frozenset(trainer.eos_token_ids)
        params = GenerationParams(sampling_params, G, args.max_completion_length, stop_ids)
        sampler = NativeSampler(trainer.drawing.decoder, version=version)
        drawn = complete(sampler, prompts, params, RngKey(args.seed, step))
        scored = torch.from_numpy(np.concatenate(sampler.score(drawn, sampling_params)))
        Monitor(step, exact=True, version=version).compare(scored, drawn)
        for p, row in enumerate(rows):
            group = step * groups + p
            whole = _group(trainer, row, prompts[p], drawn[p * G : (p + 1) * G], version, group)
            for sample in self._rewarded(whole):
                self.rollout_buffer.put(sample)

    def _rewarded(self, group: RolloutGroup) -> list[RolloutSample]:
        """With rewards, and advantages over the group, by TRL's own function."""
        scorer = SimpleNamespace(
            reward_funcs=self._reward_funcs,
            reward_func_names=[getattr(f, "__name__", type(f).__name__) for f in self._reward_funcs],
            _env_reward_types=(),
            _provides_rollout_reward=False,
        )
        return asyncio.run(_AsyncRolloutLoop._score_group(scorer, group))


def _prompt_ids(trainer: Any, prompt: Any) -> list[int]:
    """The ids of a text, or of messages through the chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    how = trainer.args.chat_template_kwargs or {}
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **how)


def _group(
    trainer: Any, row: dict, prompt_ids: list[int], drawn: Sequence[Rollout], version: int, group: int
) -> RolloutGroup:
    """The completions of a prompt in TRL's words."""
    G, is_chat = len(drawn), not isinstance(row["prompt"], str)
    texts = [trainer.processing_class.decode(d.completion_ids, skip_special_tokens=True) for d in drawn]
    sequences = [
        TrainingSequence(
            [*prompt_ids, *d.completion_ids],
            [0] * len(prompt_ids) + [1] * len(d.completion_ids),
            [0.0] * len(prompt_ids) + d.logprobs.tolist(),
            f"{group}/{d.sample}",
        )
        for d in drawn
    ]
    return RolloutGroup(
        prompts=[row["prompt"]] * G,
        reward_kwargs={name: [value] * G for name, value in row.items() if name != "prompt"},
        completions=[[{"role": "assistant", "content": text}] if is_chat else text for text in texts],
        completions_ids=[list(d.completion_ids) for d in drawn],
        completions_sequences=[[sequence] for sequence in sequences],
        tool_call_counts=[0] * G,
        tool_failure_counts=[0] * G,
        model_version=version,
        group_id=group,
        env_rewards=[None] * G,
        rollout_rewards=[None] * G,
    )
