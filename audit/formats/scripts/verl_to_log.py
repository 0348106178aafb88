"""A DataProto that verl saved as a log of zerokl, in verl's environment.

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
