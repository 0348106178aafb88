"""What every hypothesis of registry.py predicts, where a model is at hand."""

from . import adapters, distributions, numbers, operations, tokens, weights
from .prediction import Predictor

# By the name in registry.py.
PREDICTORS: dict[str, Predictor] = {
    **numbers.PREDICTORS,
    "raw logits": distributions.raw_logits,
    "temperature not applied": distributions.without_temperature,
    "top-p and top-k not renormalised": distributions.not_renormalised,
    "generation_config.json": distributions.generation_config,
    "temperature applied otherwise": distributions.temperature_otherwise,
    "another temperature": distributions.another_temperature,
    "another top-p, top-k or min-p": distributions.another_cut,
    "another checkpoint": weights.another_checkpoint,
    "stale prefix cache": weights.stale_prefix,
    "incomplete sync": weights.incomplete_sync,
    "update applied again": weights.repeated_update,
    "weights rounded": weights.rounded_weights,
    "weights quantised": weights.quantised_weights,
    "another dtype": weights.another_dtype,
    "another rotary embedding": operations.another_rotation,
    "another epsilon": operations.another_epsilon,
    "16-bit intermediates": operations.narrow_intermediates,
    **adapters.PREDICTORS,
    "another line's prompt": tokens.another_prompt,
    "another line's completion": tokens.another_completion,
    "a special token": tokens.special_tokens,
    "padding is read": tokens.padding_read,
    "positions shifted by padding": tokens.shifted_positions,
    "other positions": tokens.restarted_positions,
    "retokenised text": tokens.retokenised,
}
