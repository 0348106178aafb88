"""How logits become the distribution that tokens are drawn from: temperature, top-k, top-p (vLLM's words)."""

from typing import NamedTuple

# The smallest and the largest temperature. Logits divided by a smaller one leave the range of fp32.
TEMPERATURES = (1e-5, 1e5)


class SamplingParams(NamedTuple):
    """The parameters of the distribution that a token is drawn from; logprob.py computes with them."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that reach this probability; 1 keeps all."""

    def check(self) -> "SamplingParams":
        """These parameters. Raises ValueError for a value out of range."""
        low, high = TEMPERATURES
        if self.temperature != 0.0 and not low <= self.temperature <= high:
            raise ValueError(
                f"temperature ({self.temperature}) must be 0 (greedy), or lie in {low:g} to {high:g}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must be 0 (off) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p ({self.top_p}) must lie in (0, 1]")
        return self

    def keeps_all(self, vocab_size: int) -> bool:
        """Whether the kept set holds all tokens. Greedy is reported under the whole distribution."""
        return self.temperature == 0.0 or not (0 < self.top_k < vocab_size or self.top_p < 1.0)
