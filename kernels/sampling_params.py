"""How logits become the distribution that tokens are drawn from (vLLM's words).

The parameters are temperature, top-k, top-p, min-p, a bias of single tokens, and the tokens that are allowed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

# The smallest and the largest temperature. Logits divided by a smaller one leave the range of fp32.
TEMPERATURES = (1e-5, 1e5)
# A bias lies between -BIAS and BIAS. vLLM cuts a larger one to this (SamplingParams.from_optional).
BIAS = 100.0
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Characters of what is no token id that a message shows.
_SHOWN = 40
# Penalties of vLLM, and the values that are off. zerokl draws without them.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
WHY_NO_PENALTY = (
    "a penalty makes a token's distribution depend on which tokens its request has drawn or read before, and "
    "the trainer scores all tokens of a sequence at once, without such a record of each; leave it out, or "
    "lower single tokens with logit_bias"
)


class SamplingParams(NamedTuple):
    """The parameters of the distribution that a token is drawn from; truncation.py computes with them.

    `of` makes them from lists and dicts.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that reach this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the largest probability; 0 keeps all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit before the temperature), by ascending id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Keep only these tokens, by ascending id; None keeps all."""

    @classmethod
    def of(
        cls,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
    ) -> "SamplingParams":
        """Parameters whose tokens are in order. Equal distributions have equal parameters.

        logit_bias: token id -> bias, or pairs of both. Raises ValueError where it holds something else, and
        where allowed_token_ids cannot be put in order.
        """
        pairs = logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias or ()
        try:
            bias = tuple(sorted((token, float(value)) for token, value in pairs))
        except (TypeError, ValueError):
            raise ValueError(
                f"logit_bias ({logit_bias!r}) must be pairs of a token id and a number"
            ) from None
        try:
            allowed = None if allowed_token_ids is None else tuple(sorted(set(allowed_token_ids)))
        except TypeError:
            raise ValueError(f"allowed_token_ids ({allowed_token_ids!r}) must be token ids") from None
        return cls(temperature, top_k, top_p, min_p, bias, allowed)

    def check(self, vocab_size: int | None = None) -> "SamplingParams":
        """These parameters. Raises ValueError for a value out of range.

        vocab_size: token ids are below it; None where the model is not known yet.
        """
        low, high = TEMPERATURES
        if self.temperature != 0.0 and not low <= self.temperature <= high:
            raise ValueError(
                f"temperature ({self.temperature}) must be 0 (greedy), or lie in {low:g} to {high:g}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must be 0 (off) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p ({self.top_p}) must lie in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p ({self.min_p}) must lie in [0, 1]; 0 keeps all tokens")
        if self.logit_bias:
            _check_bias(self.logit_bias, vocab_size)
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids, vocab_size)
        return self

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out because they are unlikely. A greedy draw is reported without this."""
        return self.temperature != 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether single tokens are biased or left out, whatever their logits are."""
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def cuts(self) -> bool:
        """Whether any token is left out, as unlikely or as not allowed."""
        return self.truncates or self.allowed_token_ids is not None

    @property
    def uncut(self) -> "SamplingParams":
        """The same temperature and bias over the whole vocabulary."""
        return self._replace(top_k=0, top_p=1.0, min_p=0.0, allowed_token_ids=None)

    def only_divides(self, vocab_size: int) -> bool:
        """Whether z = logits / temperature: no token is left out, and none is biased."""
        whole = self.top_p == 1.0 and self.min_p == 0.0 and not 0 < self.top_k < vocab_size
        return (whole or not self.truncates) and not self.changes_logits


def bias_by_id(logit_bias: Mapping[Any, Any]) -> dict[int, Any]:
    """A table whose keys are token ids, as text in JSON and TOML, by ascending id.

    Raises ValueError for a key that is no token id. An id has one text, so that no two keys are one token.
    """
    by_text = {str(token): bias for token, bias in logit_bias.items()}
    for text in by_text:
        if not _TOKEN_ID.fullmatch(text):
            raise ValueError(f"{text[:_SHOWN]!r} is no token id")
    if len(by_text) < len(logit_bias):
        raise ValueError("a token id is there twice")
    return {int(text): by_text[text] for text in sorted(by_text, key=int)}


def _check_bias(logit_bias: Any, vocab_size: int | None) -> None:
    ids = [token for token, _ in logit_bias]
    _check_ids("logit_bias", ids, vocab_size)
    for token, value in logit_bias:
        if not abs(value) <= BIAS:  # true for NaN
            raise ValueError(f"logit_bias ({value}) of token {token} must lie in {-BIAS:g} to {BIAS:g}")


def _check_allowed(ids: Any, vocab_size: int | None) -> None:
    if not ids:
        raise ValueError("allowed_token_ids is empty, so no token could be drawn; leave it out to allow all")
    _check_ids("allowed_token_ids", ids, vocab_size)


def _check_ids(name: str, ids: Any, vocab_size: int | None) -> None:
    """Raise ValueError unless these are token ids in ascending order, each once."""
    end = math.inf if vocab_size is None else vocab_size
    for token in ids:
        if type(token) is not int or not 0 <= token < end:
            where = "" if vocab_size is None else f", outside the model's vocabulary of {vocab_size}"
            raise ValueError(f"{name} holds {token!r}, which is no token id{where}")
    for before, after in pairwise(ids):
        if before >= after:
            raise ValueError(
                f"{name}: token {after} follows {before}, and each id must be there once, ascending; "
                "SamplingParams.of sorts them"
            )


def refuse_penalties(caller: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a penalty in `settings` that is not off, with the reason. Other keys pass."""
    for name, off in PENALTIES.items():
        if settings.get(name) not in (None, off):
            raise ValueError(f"{caller}: {name} ({settings[name]!r}) is refused: {WHY_NO_PENALTY}")
