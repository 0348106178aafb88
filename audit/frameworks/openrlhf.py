"""OpenRLHF: it writes no log that zerokl reads, and its experiences are recorded."""

from ..formats.framework import Framework, Recording

FRAMEWORK = Framework(
    name="openrlhf",
    title="OpenRLHF",
    page="openrlhf.md",
    source="OpenRLHF 0.11, `openrlhf/trainer/ppo_utils/experience_maker.py`",
    recording=Recording(
        recorder="openrlhf:record",
        switch="one line: a recorder",
        fields={
            "completion_ids": "`sequences` without padding; the completion begins at the first action",
            "mask": "`action_mask`, 0 for the tokens of an environment",
            "logprobs": "`rollout_log_probs`, 9 digits",
            "trainer_logprobs": "`action_log_probs`, 9 digits",
            "sampling_params": "what `record` is given",
            "step weight_span": "the number of batches before it, from `first_step` on",
            "reward": "`rewards`",
        },
    ),
)
