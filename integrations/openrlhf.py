"""A recorder for OpenRLHF's PPO trainer (OpenRLHF 0.11): one line after its experience maker was made.

    record(trainer.experience_maker, "log.jsonl", temperature=1.0)

Every experience that the trainer makes becomes lines of the log, with token ids and both columns. The batch
is only read. The trainer is an actor of Ray, so the line stands where the trainer is made: in a subclass of
PPOTrainer, after super().__init__.
"""

from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from .recorder import Recorder


def record(maker: Any, path: str | Path, first_step: int = 0, **sampling: Any) -> Recorder:
    """Record what a RemoteExperienceMaker makes; call it before the first training step.

    first_step: step of the first batch, for a run that was resumed. sampling: temperature, top_p and the
    like, as the rollout engine has them. Returns the recorder, whose close() ends the log. Raises ValueError
    for another object, for an unknown field, for a penalty that is not off, and for a file that exists.
    """
    make = getattr(maker, "make_experience_batch", None)
    if not callable(make):
        raise ValueError(f"openrlhf.record: {type(maker).__name__} is no experience maker of OpenRLHF 0.11")
    recorder = Recorder(path, **sampling)
    step = first_step

    @wraps(make)
    def make_and_record(*arguments: Any, **named: Any) -> Any:
        nonlocal step
        experiences = make(*arguments, **named)
        record_experiences(recorder, experiences, step)
        step += 1
        return experiences

    maker.make_experience_batch = make_and_record
    return recorder


def record_experiences(recorder: Recorder, experiences: Sequence[Any], step: int) -> None:
    """Write the sequences of a step's experiences, each padded on its own.

    sequences and attention_mask: [B, T]. action_mask, rollout_log_probs and action_log_probs: [B, T - 1],
    where entry t is of token t + 1.
    """
    for experience in experiences:
        columns = {
            "logprobs": experience.rollout_log_probs,
            "trainer_logprobs": experience.action_log_probs,
        }
        for i, sequence in enumerate(experience.sequences):
            drawn = experience.action_mask[i].bool()
            attended = experience.attention_mask[i].bool()
            places = drawn.nonzero()
            if not len(places):
                continue
            first, last = int(places[0]), int(attended.nonzero()[-1])  # the token at `last` is the last one
            ids = sequence[: first + 1][attended[: first + 1]]
            recorder.record(
                ids,
                sequence[first + 1 : last + 1],
                mask=drawn[first:last],
                reward=None if experience.rewards is None else float(experience.rewards[i]),
                step=step,
                weight_version=step,
                **{name: column[i][first:last] for name, column in columns.items() if column is not None},
            )
    recorder.flush()
