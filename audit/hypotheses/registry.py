"""The table of hypotheses, their order and their remedies. It needs no model.

A new one is a row here, a function that says what the log would hold, and its name beside this function: in
numbers.py where it needs no model, else in predictors.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hypothesis:
    """One kind of explanation."""

    name: str
    remedy: str


_PROCESSED = (
    "Let the sampler report processed log-probabilities (vLLM: logprobs_mode='processed_logprobs'), and "
    "apply the same temperature, top-p and top-k in the trainer."
)
_SAME_SETTINGS = "Give the sampler and the trainer the same temperature, top-p and top-k."
_INDEX = "Carry prompt, completion and log-probabilities in one record from the sampler to the trainer."
_POSITIONS = (
    "Give the forward position_ids that count real tokens (cumsum of the attention mask), and the "
    "attention mask itself."
)
_ALIGN = "The logits at token i predict token i + 1: shift labels, mask and log-probabilities alike."

# Of several that fit equally well, the first is named. So the simple ones stand first.
HYPOTHESES = (
    Hypothesis(
        "rounded log-probabilities",
        "Log all 9 digits of an fp32 number, or say in the log how many decimals it keeps (decimals).",
    ),
    Hypothesis("raw logits", _PROCESSED),
    Hypothesis("temperature not applied", _PROCESSED),
    Hypothesis("top-p and top-k not renormalised", _PROCESSED),
    Hypothesis(
        "generation_config.json",
        "Give the sampler its settings explicitly (vLLM: generation_config='vllm').",
    ),
    Hypothesis("temperature applied otherwise", "Divide the logits by it once."),
    Hypothesis("another temperature", _SAME_SETTINGS),
    Hypothesis("another top-p, top-k or min-p", _SAME_SETTINGS),
    Hypothesis(
        "logit bias",
        "Add it on both sides, and write logit_bias into the log; or take it away.",
    ),
    Hypothesis(
        "penalties",
        "Switch repetition, presence and frequency penalties off in the sampler: a trainer that scores all "
        "tokens at once does not have them.",
    ),
    Hypothesis(
        "padded vocabulary",
        "Cut the logits to the tokenizer's vocabulary before the log-sum-exp.",
    ),
    Hypothesis("soft-capped logits", "Cap the logits on both sides, or on none (final_logit_softcapping)."),
    Hypothesis("logarithms to another base", "Log natural logarithms."),
    Hypothesis("means in place of tokens", "Log one number for each token."),
    Hypothesis("off by one", _ALIGN),
    Hypothesis("mask off by one", _ALIGN),
    Hypothesis(
        "wrong numbers at some places",
        "Score these tokens as all others: look for an index off by one, a chunk's edge, or a cut there.",
    ),
    Hypothesis("zeros for tokens not drawn", "Mask these tokens out of the loss, and log null for them."),
    Hypothesis(
        "another checkpoint",
        "The sync did not reach the sampler, or came late: compare weight versions before each draw.",
    ),
    Hypothesis(
        "stale prefix cache",
        "Reset the prefix cache whenever the weights change.",
    ),
    Hypothesis(
        "between two checkpoints",
        "A part of the update is missing in the sampler, or it averages weights: compare the scale of the "
        "update, or of the adapter, on both sides.",
    ),
    Hypothesis(
        "incomplete sync",
        "The sync left these tensors out, or the engine dropped them: hash both sides (zerokl weights).",
    ),
    Hypothesis(
        "update applied again",
        "Merge an adapter into the base weights each time, never into merged ones.",
    ),
    Hypothesis(
        "adapter missing",
        "Load the adapter into the sampler, or give it the merged weights, before it draws.",
    ),
    Hypothesis(
        "another adapter",
        "Sync the adapter before each draw: compare its version in the sampler with the trainer's.",
    ),
    Hypothesis(
        "adapter scaled otherwise",
        "Give both sides one scale: lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.",
    ),
    Hypothesis(
        "adapter merged otherwise",
        "Merge into the untouched base each time, in fp32, and round once; never unmerge in 16 bits.",
    ),
    Hypothesis(
        "adapter beside the weights",
        "Let both sides compute one expression: give the sampler the merged weights that the trainer scores "
        "with.",
    ),
    Hypothesis(
        "weights rounded",
        "Merge adapters and sync weights in the trainer's dtype, or score with the rounded weights too.",
    ),
    Hypothesis(
        "weights quantised",
        "Let the trainer score with the quantised weights, or correct for it (importance sampling).",
    ),
    Hypothesis(
        "another dtype",
        "Give both the same dtype, or correct for the difference (importance sampling).",
    ),
    Hypothesis(
        "keys and values rounded",
        "Give the cache the compute dtype, or score with rounded keys and values too (kv_cache_dtype).",
    ),
    Hypothesis(
        "attention otherwise",
        "Give both sides one attention: its window (sliding_window), its soft cap, its sinks.",
    ),
    Hypothesis(
        "another rotary embedding",
        "Compare rope_theta and rope_scaling of both configurations.",
    ),
    Hypothesis("another epsilon", "Compare rms_norm_eps of both configurations."),
    Hypothesis(
        "16-bit intermediates",
        "Switch the fused kernel off (Megatron: apply_rope_fusion, bias_activation_fusion), or let both "
        "sides use it.",
    ),
    Hypothesis("another line's numbers", _INDEX),
    Hypothesis("another line's prompt", _INDEX),
    Hypothesis("another line's completion", _INDEX),
    Hypothesis(
        "a special token",
        "Hand the sampler's own token ids to the trainer; apply the chat template once.",
    ),
    Hypothesis("padding is read", _POSITIONS),
    Hypothesis("positions shifted by padding", _POSITIONS),
    Hypothesis("other positions", _POSITIONS),
    Hypothesis(
        "retokenised text",
        "Hand token ids from the sampler to the trainer; never decode and encode again.",
    ),
)

# Kinds that are rounding themselves: they are no fault where the difference is no larger than rounding.
ROUNDINGS = ("another dtype", "weights rounded", "16-bit intermediates")
# Kinds whose prediction is itself of roundings that another engine decides otherwise now and then: the
# slope of the difference on it is below 1.
DIMMED = ("weights quantised", "keys and values rounded")
# Kinds that are tried once more on what a first cause leaves.
SECOND = (
    "rounded log-probabilities",
    "another temperature",
    "another top-p, top-k or min-p",
    "logit bias",
    "penalties",
    "wrong numbers at some places",
    "another checkpoint",
    "weights quantised",
    "keys and values rounded",
)
# Kinds that look for what they need among all lines, or need no model.
WHOLE_LOG = (
    "rounded log-probabilities",
    "logarithms to another base",
    "means in place of tokens",
    "off by one",
    "mask off by one",
    "wrong numbers at some places",
    "zeros for tokens not drawn",
    "another line's numbers",
    "another line's prompt",
    "another line's completion",
)
# Kinds that search nothing and change no weight: a model scores the lines once at most.
AT_ONCE = (
    *WHOLE_LOG,
    "raw logits",
    "temperature not applied",
    "top-p and top-k not renormalised",
    "generation_config.json",
    "temperature applied otherwise",
)
# Kinds whose difference is far above rounding, and that take many forwards: they are tried where no other one
# fits, and not at all where the whole difference is like rounding.
LATE = (
    "attention otherwise",
    "another rotary embedding",
    "another line's prompt",
    "another line's completion",
    "a special token",
    "padding is read",
    "positions shifted by padding",
    "other positions",
    "retokenised text",
)
