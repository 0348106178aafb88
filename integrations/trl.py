"""A recorder for TRL's GRPOTrainer (TRL 1.16).

    trainer = GRPOTrainer(...)
    record(trainer, "log.jsonl")
    trainer.train()

Every completion of a training batch becomes a line of the log.

| column | where it comes from |
| --- | --- |
| logprobs | vLLM's, as TRL got them; or the scores that transformers' generate drew from |
| trainer_logprobs | TRL's own; where TRL computes none for a batch, the recorder runs this forward |

The run stays the same. The recorder only reads, and its forward leaves the random generators as they were. It
costs that forward, and [B, V] fp32 for each token that transformers generates.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..kernels.sampling_params import PENALTIES
from .recorder import Recorder

_METHODS = ("_generate_and_score_completions", "_generate", "_generate_single_turn")


def record(trainer: Any, path: str | Path, trainer_logprobs: bool = True) -> Recorder:
    """Record what a GRPOTrainer samples; call it before trainer.train().

    With several processes each writes a file of its own: log.rank1.jsonl beside log.jsonl.
    trainer_logprobs: run the trainer's forward once more for a batch for which TRL runs none. Without it such
    a batch has no trainer column.
    Returns the recorder, whose close() ends the log. Raises ValueError for another kind of trainer, for a
    penalty that is not off, and for a file that exists.
    """
    missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
    if missing or not hasattr(trainer, "num_generations"):
        raise ValueError(f"trl.record: {type(trainer).__name__} is no GRPOTrainer of TRL 1.16")
    rank = trainer.accelerator.process_index
    path = Path(path)
    path = path.with_suffix(f".rank{rank}{path.suffix}") if rank else path
    recorder = Recorder(path, **_drawn_with(trainer))
    _Seams(trainer, recorder, trainer_logprobs)
    return recorder


def _drawn_with(trainer: Any) -> dict[str, Any]:
    """The distribution that TRL draws from, as fields of a log. generation_kwargs override the others."""
    args = trainer.args
    values = {
        "temperature": trainer.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    known = (*values, "logit_bias", "allowed_token_ids", *PENALTIES)
    values |= {name: value for name, value in (args.generation_kwargs or {}).items() if name in known}
    values["top_k"] = max(0, values["top_k"] or 0)
    return {name: value for name, value in values.items() if value is not None}


class _Generated(NamedTuple):
    """What one call of TRL's _generate returned, unpadded: a list for each completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    logprobs: list[list[float | None]] | None


class _Seams:
    """Stands around three methods of a trainer, and writes when the outermost returns."""

    def __init__(self, trainer: Any, recorder: Recorder, score: bool):
        self.trainer, self.recorder, self._score = trainer, recorder, score
        self._generated: _Generated | None = None
        # What transformers drew in the last call of generate: ids and logprobs of each completion.
        self._drawn: tuple[list[list[int]], list[list[float]]] | None = None
        self._inner = {name: getattr(trainer, name) for name in _METHODS}
        trainer._generate_and_score_completions = self._generate_and_score
        trainer._generate = self._generate
        trainer._generate_single_turn = self._generate_single_turn

    def _generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.trainer.model.training
        output = self._inner["_generate_and_score_completions"](inputs)
        if training:
            self._write(output)
        self._generated = self._drawn = None
        return output

    def _generate(self, prompts: list) -> tuple:
        result = self._inner["_generate"](prompts)
        prompt_ids, completion_ids, tool_mask, _, logprobs = result[:5]
        if logprobs is None and self._drawn is not None and self._drawn[0] == completion_ids:
            logprobs = self._drawn[1]
        self._generated = _Generated(prompt_ids, completion_ids, tool_mask, logprobs)
        return result

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> tuple:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with _drawn_logprobs(model) as batches:
            result = self._inner["_generate_single_turn"](*arguments, **named)
        if len(batches) == 1:
            ids = result[0]
            self._drawn = ids, [row[: len(x)].tolist() for x, row in zip(ids, batches[0], strict=True)]
        return result

    def _write(self, output: dict[str, Any]) -> None:
        prompt_ids, completion_ids, tool_mask, logprobs = self._generated
        trainer = self.trainer
        scored = self._trainer_logprobs(output)
        rewards = _rewards(trainer, len(completion_ids))
        step, G = int(trainer.state.global_step), trainer.num_generations
        for i, completion in enumerate(completion_ids):
            self.recorder.record(
                prompt_ids[i],
                completion,
                None if logprobs is None else logprobs[i],
                trainer_logprobs=None if scored is None else scored[i, : len(completion)],
                mask=None if tool_mask is None else tool_mask[i],
                weight_version=step,
                step=step,
                prompt=i // G,
                sample=i % G,
                advantage=float(output["advantages"][i]) if output["advantages"].ndim == 1 else None,
                reward=None if rewards is None else rewards[i],
            )
        self.recorder.flush()

    def _trainer_logprobs(self, output: dict[str, Any]) -> torch.Tensor | None:
        """[B, C]: TRL's own, or those of one more forward over the same padded batch.

        Images need arguments that the batch does not hold in TRL's form, so a batch with images has none.
        """
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        if not self._score or "pixel_values" in output:
            return None
        trainer = self.trainer
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                ids,
                attended,
                output["completion_ids"].size(1),
                batch_size=trainer.args.per_device_train_batch_size,
            )
        return logprobs


def _rewards(trainer: Any, count: int) -> list[float | None] | None:
    """The weighted reward of each completion. With several processes TRL keeps the rewards of all of them."""
    if trainer.accelerator.num_processes > 1:
        return None
    weights = trainer.reward_weights.tolist()
    columns = [list(trainer._logs["rewards"][name])[-count:] for name in trainer.reward_func_names]
    totals = []
    for values in zip(*columns, strict=True):
        known = [w * v for w, v in zip(weights, values, strict=True) if v is not None and not math.isnan(v)]
        totals.append(sum(known) if known else None)
    return totals


@contextmanager
def _drawn_logprobs(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside, model.generate also leaves the logprobs [B, C] of what it draws in the list.

    They are of the scores after every processor (temperature, top-k, top-p): the distribution that was drawn
    from. The caller of generate gets the ids, as without the recorder.
    """
    batches: list[torch.Tensor] = []
    generate = model.generate

    def generate_with_scores(*arguments: Any, **named: Any) -> torch.Tensor:
        result = generate(*arguments, **named, return_dict_in_generate=True, output_scores=True)
        completion = result.sequences[:, -len(result.scores) :]
        columns = [
            torch.log_softmax(scores.float(), dim=-1).gather(1, completion[:, t : t + 1].to(scores.device))
            for t, scores in enumerate(result.scores)
        ]
        batches.append(torch.cat(columns, dim=1).cpu())
        return result.sequences

    model.generate = generate_with_scores
    try:
        yield batches
    finally:
        del model.generate
