"""A recorder for verl's RayPPOTrainer (verl 0.9): a line before trainer.fit().

    record(trainer)

Where the trainer's class is chosen and the trainer is not at hand, there is a class to put before it:

    class RecordedTrainer(RecordsRollouts, RayPPOTrainer):
        pass

verl calls _log_rollout_data for each step when trainer.rollout_data_dir is set. The recorder writes
ROLLOUT_DATA_DIR.zerokl/STEP.jsonl with token ids and both columns, and then verl writes its texts.
actor_rollout_ref.rollout.calculate_log_probs = True gives the sampler's column.
"""

from functools import wraps
from pathlib import Path
from typing import Any

from .recorder import Recorder, sampling_fields


def record(trainer: Any) -> None:
    """Record each step's batch of a RayPPOTrainer; call it before trainer.fit().

    Raises ValueError for another kind of trainer, and where verl would not log: then nothing is recorded.
    """
    log = getattr(trainer, "_log_rollout_data", None)
    if not callable(log):
        raise ValueError(f"verl.record: {type(trainer).__name__} is no RayPPOTrainer of verl 0.9")
    if not trainer.config.trainer.get("rollout_data_dir", None):
        raise ValueError(
            "verl.record: trainer.rollout_data_dir is not set; verl logs, and we record, beside it"
        )

    @wraps(log)
    def record_and_log(batch: Any, *arguments: Any, **named: Any) -> Any:
        _record_step(trainer, batch, arguments, named)
        return log(batch, *arguments, **named)

    trainer._log_rollout_data = record_and_log


class RecordsRollouts:
    """Records each step's batch before verl logs it. The batch is only read."""

    def _log_rollout_data(self, batch: Any, *arguments: Any, **named: Any) -> None:
        _record_step(self, batch, arguments, named)
        super()._log_rollout_data(batch, *arguments, **named)


def _record_step(trainer: Any, batch: Any, arguments: tuple, named: dict[str, Any]) -> None:
    """Write a batch beside the folder that verl logs to. arguments, named: of verl's call."""
    folder = Path(named["rollout_data_dir"] if "rollout_data_dir" in named else arguments[-1])
    step = int(trainer.global_steps)
    path = folder.with_name(f"{folder.name}.zerokl") / f"{step}.jsonl"
    record_batch(batch, path, step, trainer.config)


def record_batch(batch: Any, path: str | Path, step: int, config: Any) -> None:
    """Write a DataProto as a log.

    step: verl's global step; the weights that drew the batch are those after step - 1 updates. config: verl's
    configuration. Raises ValueError for a file that exists, and for a penalty that is not off.
    """
    tensors, sampling = batch.batch, config.actor_rollout_ref.rollout
    columns = {"logprobs": "rollout_log_probs", "mask": "response_mask", "advantage": "advantages"}
    if not _bypassed(config):
        columns["trainer_logprobs"] = "old_log_probs"
    names = set(tensors.keys())
    present = {ours: tensors[name] for ours, name in columns.items() if name in names}
    P = tensors["prompts"].shape[1]
    uids = batch.non_tensor_batch.get("uid")
    drawn_with = {"top_p": 1.0, "top_k": 0} | sampling_fields(lambda name: sampling.get(name, None))
    with Recorder(
        path,
        **drawn_with | {"temperature": float(sampling.temperature)},
        step=step,
        weight_version=step - 1,
    ) as recorder:
        for i, attended in enumerate(tensors["attention_mask"].bool()):
            response = attended[P:]
            recorder.record(
                tensors["prompts"][i][attended[:P]],
                tensors["responses"][i][response],
                reward=float(tensors["token_level_scores"][i].sum()),
                prompt=None if uids is None else str(uids[i]),
                **{name: column[i][response] for name, column in present.items()},
            )


def _bypassed(config: Any) -> bool:
    """Whether verl takes the sampler's logprobs for the trainer's; then there is one column, not two."""
    correction = config.algorithm.get("rollout_correction") or {}
    return bool(correction.get("bypass_mode", False))
