"""What decides the weights of a row's keys beside the scores: one rule for all forms of one attention.

Training, prefill, prefill in chunks and decode take the same rule, so a row has the same bits in each. A mask
other than the causal one, or a cap of the scores, is a field here too.
"""

from typing import NamedTuple


class AttentionRule(NamedTuple):
    """The order of a row's sums, and what stands between its scores and its weights.

    chunk: keys of a chunk (attention.py); 0: one walk over all keys, vLLM's.
    window: the last keys that a row sees, its own among them; 0: all.
    cap: the scores s become cap tanh(s / cap); 0.0: they stay.
    """

    chunk: int = 0
    window: int = 0
    cap: float = 0.0

    def constants(self, scale: float) -> dict[str, float]:
        """Of the Triton kernels. INNER multiplies q . k before tanh; without a cap it is 0.0."""
        return {"WINDOW": self.window, "INNER": scale / self.cap if self.cap else 0.0}

    def state_bytes(self, rows: int, heads: int, head_dim: int, keys: int) -> int:
        """Of the chunks' states in a decoding turn on a GPU (attention_split_triton.py).

        rows: with room for so many keys each.
        """
        chunks = -(-keys // self.chunk) if self.chunk else 1
        return rows * heads * chunks * (head_dim + 2) * 4 if chunks > 1 else 0


WALK = AttentionRule()
# The values of precision.attention.
RULES = {"vllm": WALK, "chunked-512": AttentionRule(512)}


def named_rule(name: str) -> AttentionRule:
    """The rule of this name. Raises ValueError for an unknown one."""
    if name not in RULES:
        raise ValueError(f"attention ({name!r}) must be one of {', '.join(RULES)}")
    return RULES[name]
