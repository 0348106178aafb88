"""SkyRL: dumped_data/global_step_N_training_input.pkl, a pickle, which SkyRL's own environment converts."""

import numpy as np

from ...verify.mismatch import mean
from ..figures.gates import Columns, Gate
from ..formats.framework import Framework, Recording

_SCRIPT = '''"""SkyRL's global_step_N_training_input.pkl as a log of zerokl, in SkyRL's environment.

python SCRIPT INPUT.pkl OUT.jsonl TEMPERATURE
"""

import json
import pickle
import sys

with open(sys.argv[1], "rb") as file:
    batch = pickle.load(file)
with open(sys.argv[2], "x") as out:
    for i, attended in enumerate(batch["attention_mask"].bool()):
        ids = batch["sequences"][i][attended].tolist()
        response = batch["response_mask"][i].bool()
        count = int(response.sum())
        row = {"prompt_ids": ids[:-count], "completion_ids": ids[-count:], "temperature": float(sys.argv[3])}
        names = {"logprobs": "rollout_logprobs", "trainer_logprobs": "action_log_probs", "mask": "loss_mask"}
        for ours, name_in_pickle in names.items():
            if batch.get(name_in_pickle) is not None:
                row[ours] = batch[name_in_pickle][i][response].tolist()
        row.setdefault("logprobs", [None] * count)
        if count:
            print(json.dumps(row), file=out)
'''


def _abs(c: Columns) -> float:
    return mean(np.abs(c.d))


FRAMEWORK = Framework(
    name="skyrl",
    title="SkyRL",
    page="skyrl.md",
    source="SkyRL 0.3.0, `skyrl/backends/skyrl_train/training_batch.py`",
    recording=Recording(
        recorder="skyrl:recording",
        switch="a callback, one line",
        fields={
            "completion_ids": "`sequences` without padding, parted by `response_mask`",
            "mask": "`loss_mask`",
            "logprobs": "`rollout_logprobs`, not rounded; empty where the batch has none",
            "trainer_logprobs": "`action_log_probs`, not rounded",
            "sampling_params": "`generator.sampling_params`",
            "step weight_span": "SkyRL's global step; the weights after `step` - 1 updates",
        },
    ),
    script=_SCRIPT,
    gate=Gate(
        _abs,
        "",
        "the mean of |d| over tokens",
        0.09,
        may_reach=False,
        source="SkyRL's tests of dense models, its pull request 1408",
    ),
)
