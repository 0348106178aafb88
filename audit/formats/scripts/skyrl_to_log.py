"""SkyRL's global_step_N_training_input.pkl as a log of zerokl, in SkyRL's environment.

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
