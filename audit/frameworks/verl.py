"""verl: rollout_data_dir/STEP.jsonl, which holds texts and no token ids; and a DataProto that verl saved.

`zerokl diff` compares such files. An audit refuses them: a text does not say which tokens were drawn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...verify.mismatch import mean
from ..figures.gates import Columns, Gate
from ..formats import fields
from ..formats.framework import Framework, Log, Recording, having
from ..formats.record import LoggedRollout

_SCRIPT = '''"""A DataProto that verl saved as a log of zerokl, in verl's environment.

python SCRIPT INPUT OUT.jsonl TEMPERATURE
"""

import json
import sys

from verl import DataProto

batch = DataProto.load_from_disk(sys.argv[1]).batch
P = batch["prompts"].shape[1]
with open(sys.argv[2], "x") as out:
    for i, attended in enumerate(batch["attention_mask"].bool()):
        response = attended[P:]
        count = int(response.sum())
        row = {
            "prompt_ids": batch["prompts"][i][attended[:P]].tolist(),
            "completion_ids": batch["responses"][i][response].tolist(),
            "logprobs": [None] * count,
            "temperature": float(sys.argv[3]),
        }
        names = {
            "logprobs": "rollout_log_probs",
            "trainer_logprobs": "old_log_probs",
            "mask": "response_mask",
        }
        for ours, name_in_batch in names.items():
            if batch.get(name_in_batch, None) is not None:
                row[ours] = batch[name_in_batch][i][response].tolist()
        if count:
            print(json.dumps(row), file=out)
'''


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completion of a line. Raises ValueError, or KeyError with a field."""
    yield LoggedRollout(
        prompt_text=fields.text("input", row["input"]),
        completion_text=fields.text("output", row["output"]),
        reward=fields.optional_number("score", row["score"]),
        step=fields.optional_integer("step", row.get("step")),
        sample=fields.label("uid", row.get("uid")),
    )


def _probabilities(c: Columns) -> float:
    p_trainer, p_sampler = (np.exp(x.astype(np.float64)) for x in (c.trainer, c.sampler))
    return mean(np.abs(p_trainer - p_sampler))


FRAMEWORK = Framework(
    name="verl",
    title="verl",
    page="verl.md",
    source="verl 0.9.1, `verl/trainer/ppo/ray_trainer.py`",
    logs=(
        Log(
            name="verl",
            file="`rollout_data_dir/STEP.jsonl`",
            switch="`trainer.rollout_data_dir`",
            recognises=having("input output score"),
            parse=parse,
            fields={
                "prompt_text completion_text": "`input`, `output`, without special tokens",
                "reward": "`score`",
                "step sample": "`step`, `uid`",
            },
            marks=("input",),
            columns="",
            remedy="record the run with zerokl.integrations.verl",
        ),
    ),
    recording=Recording(
        recorder="verl:record",
        switch="one line, or a class before the trainer; two settings",
        fields={
            "completion_ids": "`prompts` and `responses`, without padding",
            "mask": "`response_mask`",
            "logprobs": "`rollout_log_probs`, 9 digits",
            "trainer_logprobs": "`old_log_probs`, 9 digits; none in bypass mode, in which verl takes the "
            "sampler's for it",
            "sampling_params": "`actor_rollout_ref.rollout`",
            "weight_span step": "verl's step; the weights after `step` - 1 updates",
            "reward advantage prompt": "the sum of `token_level_scores`, `advantages`, `uid`",
        },
    ),
    script=_SCRIPT,
    gate=Gate(
        _probabilities,
        "rollout_probs_diff_mean",
        "the mean of |p - p| over tokens",
        0.01,
        may_reach=False,
        source="verl's FAQ: 0.005 is healthy, 0.01 a fault",
    ),
)
