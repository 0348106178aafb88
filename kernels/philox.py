"""Counter-based random numbers: Philox 4x32-10.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. A number is a function of (seed,
stream, counter) and of nothing else. No generator is kept, and none is advanced. So the number of one token
does not depend on the numbers beside it or before it, or on the number of workers. The host computes with
integers only, so the numbers are the same on every machine. `uniforms.py` makes them where a tensor lies.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The use of a number. It is the second word of the key, so that no two uses share a number."""

    SAMPLE = 0  # a token of a training rollout: counter (position, sample, prompt, step)
    EVALUATE = 1  # a token of an evaluation rollout
    ORDER = 2  # the order of the training problems
    WEIGHTS = 3  # initial weights
    PROBLEMS = 4  # problems a task generates
    WARM_START = 5  # the order of the supervised examples of `zerokl init`
    VERIFY = 6  # inputs of the law's checks
    WARM_START_PROBE = 7  # a token of the warm start's accuracy checks
    PERFECTIBLE = 8  # a token of the samples that choose the perfectible set
    VERIFY_SAMPLE = 9  # a token of the law's checks of the sampler
    LOGIT_NOISE = 10  # the start of the noise of a token's logits: counter (position, sample, prompt, step)
    LOGIT_NOISE_TOKENS = 11  # the noise of a token's logits
    DIGEST = 12  # the keys of the ledger's digests
    LORA = 13  # the first A of the adapters: counter (element, matrix)
    EVALUATE_TRAINING = 14  # a token of an evaluation rollout of a training problem
    # A token of what the gradient is compared on, drawn from the trainer's policy, and by the run's sampler.
    GRADIENT_EXACT = 15
    GRADIENT_SAMPLED = 16


_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_SHIFT = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox 4x32. counter [n, 4] and the result [n, 4] are 32-bit words in uint64."""
    c0, c1, c2, c3 = (np.ascontiguousarray(c) for c in np.asarray(counter, np.uint64).T)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(counter: np.ndarray, seed: int, stream: Stream) -> np.ndarray:
    """One uniform number in [0, 1) with 53 random bits for each counter.

    counter [n, 4] of 32-bit words -> [n] fp64. Raises ValueError for a seed outside 0 .. 2^32 - 1.
    """
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed ({seed}) must lie in 0 .. 2^32 - 1")
    words = philox(counter, (seed, int(stream)))
    bits = (words[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def uniform_range(n: int, seed: int, stream: Stream, word: int = 0) -> np.ndarray:
    """n uniform numbers with the counters (i, word), i = 0 .. n - 1: a reproducible array. -> [n] fp64."""
    i = np.arange(n, dtype=np.uint64)
    counter = np.stack(
        [i & _MASK, i >> _SHIFT, np.full(n, word & 0xFFFFFFFF, np.uint64), np.full(n, word >> 32, np.uint64)],
        axis=1,
    )
    return uniform(counter, seed, stream)


def permutation(n: int, seed: int, stream: Stream, word: int = 0) -> np.ndarray:
    """A random order of 0 .. n - 1, sorted by one random number each. -> [n] int64."""
    return np.argsort(uniform_range(n, seed, stream, word), kind="stable")
