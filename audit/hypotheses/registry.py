"""The table of hypotheses. A new one is a row here and a function that says what the log would hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import distributions, numbers, operations, tokens, weights
from .evidence import Evidence
from .prediction import Prediction


@dataclass(frozen=True)
class Hypothesis:
    """One kind of explanation."""

    name: str
    predict: Callable[[Evidence], Iterator[Prediction]]
    remedy: str
    needs_model: bool = True


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
        numbers.rounded,
        "Log all 9 digits of an fp32 number, or say in the log how many decimals it keeps (decimals).",
        needs_model=False,
    ),
    Hypothesis("raw logits", distributions.raw_logits, _PROCESSED),
    Hypothesis("temperature not applied", distributions.without_temperature, _PROCESSED),
    Hypothesis("top-p and top-k not renormalised", distributions.not_renormalised, _PROCESSED),
    Hypothesis(
        "generation_config.json",
        distributions.generation_config,
        "Give the sampler its settings explicitly (vLLM: generation_config='vllm').",
    ),
    Hypothesis(
        "temperature applied otherwise", distributions.temperature_otherwise, "Divide the logits by it once."
    ),
    Hypothesis("another temperature", distributions.another_temperature, _SAME_SETTINGS),
    Hypothesis("another top-p or top-k", distributions.another_cut, _SAME_SETTINGS),
    Hypothesis(
        "logarithms to another base", numbers.another_base, "Log natural logarithms.", needs_model=False
    ),
    Hypothesis(
        "means in place of tokens",
        numbers.sequence_mean,
        "Log one number for each token.",
        needs_model=False,
    ),
    Hypothesis("off by one", numbers.shifted, _ALIGN, needs_model=False),
    Hypothesis("mask off by one", numbers.mask_off_by_one, _ALIGN, needs_model=False),
    Hypothesis(
        "zeros for tokens not drawn",
        numbers.zeros,
        "Mask these tokens out of the loss, and log null for them.",
        needs_model=False,
    ),
    Hypothesis(
        "another checkpoint",
        weights.another_checkpoint,
        "The sync did not reach the sampler, or came late: compare weight versions before each draw.",
    ),
    Hypothesis(
        "stale prefix cache",
        weights.stale_prefix,
        "Reset the prefix cache whenever the weights change.",
    ),
    Hypothesis(
        "incomplete sync",
        weights.incomplete_sync,
        "The sync left these tensors out, or the engine dropped them: hash both sides (zerokl weights).",
    ),
    Hypothesis(
        "update applied again",
        weights.repeated_update,
        "Merge an adapter into the base weights each time, never into merged ones.",
    ),
    Hypothesis(
        "weights rounded",
        weights.rounded_weights,
        "Merge adapters and sync weights in the trainer's dtype, or score with the rounded weights too.",
    ),
    Hypothesis(
        "weights quantised",
        weights.quantised_weights,
        "Let the trainer score with the quantised weights, or correct for it (importance sampling).",
    ),
    Hypothesis(
        "another dtype",
        weights.another_dtype,
        "Give both the same dtype, or correct for the difference (importance sampling).",
    ),
    Hypothesis(
        "another rotary embedding",
        operations.another_rotation,
        "Compare rope_theta and rope_scaling of both configurations.",
    ),
    Hypothesis("another epsilon", operations.another_epsilon, "Compare rms_norm_eps of both configurations."),
    Hypothesis(
        "16-bit intermediates",
        operations.narrow_intermediates,
        "Switch the fused kernel off (Megatron: apply_rope_fusion, bias_activation_fusion), or let both "
        "sides use it.",
    ),
    Hypothesis("another line's numbers", numbers.another_lines_numbers, _INDEX, needs_model=False),
    Hypothesis("another line's prompt", tokens.another_prompt, _INDEX),
    Hypothesis("another line's completion", tokens.another_completion, _INDEX),
    Hypothesis(
        "a special token",
        tokens.special_tokens,
        "Hand the sampler's own token ids to the trainer; apply the chat template once.",
    ),
    Hypothesis("padding is read", tokens.padding_read, _POSITIONS),
    Hypothesis("positions shifted by padding", tokens.shifted_positions, _POSITIONS),
    Hypothesis("other positions", tokens.restarted_positions, _POSITIONS),
    Hypothesis(
        "retokenised text",
        tokens.retokenised,
        "Hand token ids from the sampler to the trainer; never decode and encode again.",
    ),
)
