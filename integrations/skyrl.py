"""A recorder for SkyRL's trainer (SkyRL 0.3): one of its callbacks.

    callbacks=[recording(TrainingCallback, "log.jsonl")]

TrainingCallback is skyrl.train.utils.callbacks.TrainingCallback. Every sequence of a training batch becomes
a line of the log, with token ids and both columns. The batch is only read.
"""

from pathlib import Path
from typing import Any

from .recorder import Recorder, sampling_fields


def recording(base: type, path: str | Path) -> Any:
    """A callback of SkyRL's that records each step.

    base: SkyRL's TrainingCallback, which knows all events. Raises ValueError for a file that exists, and, in
    the first step, for a penalty that is not off.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"recorder: {path} exists; choose another file")

    class Recording(base):
        """Writes the batch of each step."""

        recorder: Recorder | None = None

        def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
            """Write the batch of the step that ended."""
            if self.recorder is None:
                self.recorder = Recorder(path, **_drawn_with(trainer.cfg.generator.sampling_params))
            record_batch(self.recorder, callback_input.batch, int(callback_input.global_step))

        def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
            """Close the log."""
            if self.recorder is not None:
                self.recorder.close()

    return Recording()


def _drawn_with(params: Any) -> dict[str, Any]:
    """The distribution that SkyRL draws from, as fields of a log."""
    get = params.get if hasattr(params, "get") else lambda name, default: getattr(params, name, default)
    return {"top_k": 0} | sampling_fields(lambda name: get(name, None))


def record_batch(recorder: Recorder, batch: Any, step: int) -> None:
    """Write a TrainingInputBatch.

    sequences and attention_mask: [B, T], padded on the left. response_mask, loss_mask, rollout_logprobs and
    action_log_probs: [B, A]. step: SkyRL's global step, from 1; the weights that drew the batch are those
    after step - 1 updates, where SkyRL draws synchronously.
    """
    names = {"logprobs": "rollout_logprobs", "trainer_logprobs": "action_log_probs", "mask": "loss_mask"}
    columns = {ours: batch[name] for ours, name in names.items() if batch.get(name) is not None}
    for i, attended in enumerate(batch["attention_mask"].bool()):
        ids = batch["sequences"][i][attended]
        response = batch["response_mask"][i].bool()
        count = int(response.sum())
        if not count:
            continue
        recorder.record(
            ids[:-count],
            ids[-count:],
            step=step,
            weight_version=step - 1,
            **{name: column[i][response] for name, column in columns.items()},
        )
    recorder.flush()
