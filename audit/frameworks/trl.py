"""TRL: completions/completions_STEP.parquet, which holds texts and no token ids.

`zerokl diff` compares such files. An audit refuses them: a text does not say which tokens were drawn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.framework import Framework, Log, Recording, having
from ..formats.record import LoggedRollout


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completion of a row. Raises ValueError, or KeyError with a field.

    Each reward has a column of its own; where there is one, it is the reward.
    """
    rewards = [
        value
        for name, value in row.items()
        if name not in ("step", "prompt", "completion", "advantage") and type(value) in (int, float)
    ]
    yield LoggedRollout(
        prompt_text=_text(row["prompt"]),
        completion_text=_text(row["completion"]),
        reward=rewards[0] if len(rewards) == 1 else None,
        advantage=fields.optional_number("advantage", row["advantage"]),
        step=fields.optional_integer("step", row["step"]),
    )


def _text(value: Any) -> str:
    """A text, or the messages of a chat one after the other."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in value if isinstance(m, dict))
    return str(value)


FRAMEWORK = Framework(
    name="trl",
    title="TRL",
    page="trl.md",
    source="TRL 1.16, `trl/trainer/grpo_trainer.py`",
    logs=(
        Log(
            name="trl",
            file="`completions/completions_STEP.parquet`",
            switch="`log_completions=True`",
            recognises=having("step prompt completion advantage"),
            parse=parse,
            fields={
                "prompt_text completion_text": "`prompt`, `completion`",
                "reward": "the reward's own column, where there is one reward",
                "advantage step": "`advantage`, `step`",
            },
            marks=("completion",),
            columns="",
            remedy="record the run with zerokl.integrations.trl.record",
        ),
    ),
    recording=Recording(
        recorder="trl:record",
        switch="one line in the training script: a recorder",
        fields={
            "completion_ids": "the sampler's, without padding",
            "mask": "0 for the tokens of tools",
            "logprobs": "vLLM; or the scores that transformers drew from, after temperature, top-k and top-p",
            "trainer_logprobs": "TRL's own; where TRL computes none for a batch, one more forward of the "
            "recorder",
            "sampling_params": "the trainer's settings",
            "weight_span step": "the trainer's `global_step`: version 300 is `checkpoint-300`, version 0 the "
            "first model",
            "prompt sample": "the place in the batch",
            "reward advantage": "TRL's; with several processes there is no reward",
        },
    ),
)
