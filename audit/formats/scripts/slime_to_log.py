"""A dump of slime (--save-debug-rollout-data or -train-data) as plain values, in slime's environment.

python SCRIPT INPUT.pt OUT.jsonl; then zerokl audit OUT.jsonl --format slime
"""

import json
import sys

import torch

NAMES = (
    "tokens",
    "response_length",
    "response_lengths",
    "loss_mask",
    "loss_masks",
    "rollout_log_probs",
    "log_probs",
    "weight_versions",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "group_index",
    "index",
)
dump = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
with open(sys.argv[2], "x") as out:
    for sample in dump["samples"]:
        row = {name: sample[name] for name in NAMES if sample.get(name) is not None}
        row["rollout_id"] = dump["rollout_id"]
        print(json.dumps(row, default=lambda value: value.tolist()), file=out)
