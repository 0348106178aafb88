"""The presets of the loss whose tokens are all drawn, which a run of any task can have."""

from zerokl.engine.config.loss_section import PRESETS

# The advantages of the others are of tokens that nobody drew, or of reasonings that are cut at budgets.
DRAWN_PRESETS = [name for name, row in PRESETS.items() if row["advantage"] not in ("dpo", "verifree", "brpo")]
# Those whose advantages are of completions, from their rewards.
REWARD_PRESETS = [name for name in DRAWN_PRESETS if PRESETS[name]["advantage"] != "gae"]
