"""A dump of slime or miles (--save-debug-rollout-data or -train-data) as plain values, where it was written.

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
    "reward",
    "local_raw_reward",
    "rewards",
    "advantages",
    "group_index",
    "index",
    "sample_index",
    "sample_indices",
)


def samples(dump):
    """The samples: a list of them, or, of one rank, columns with an entry for each."""
    if "samples" in dump:
        return dump["samples"]
    if dump.get("cp_size", 1) != 1:
        sys.exit(
            "a rank of context parallelism has a slice of each response; dump with --context-parallel-size 1"
        )
    data = dump["rollout_data"]
    columns = {name: data[name] for name in NAMES if data.get(name) is not None}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(value):
    """A value that JSON does not have: a tensor or an array as a list, anything else as a text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


dump = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
with open(sys.argv[2], "x") as out:
    for sample in samples(dump):
        row = {name: sample[name] for name in NAMES if sample.get(name) is not None}
        print(json.dumps(row | {"rollout_id": dump["rollout_id"]}, default=plain), file=out)
