"""The semantic entropy of a group, which scales its advantages (SEED-GRPO, arXiv:2505.12346, section 3.2).

    SE = -sum_c p_c log p_c           over the classes of completions that mean the same, in nats
    A <- A (1 - alpha SE / log n)     n completions; log n is the largest SE

p_c is the share of a class among the completions. This is the discrete semantic entropy (Farquhar et al.,
Nature 630, 2024). The paper adds up the likelihoods of whole completions instead, and leaves open the falling
function of alpha SE / log n; the linear one is here. So a group whose completions all mean the same keeps its
advantages, and one whose completions all differ has them times 1 - alpha.

Completions that are not trained on count in no class. Sums are correctly rounded (math.fsum), so the order of
the completions decides no bit.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def normalised_entropy(classes: Sequence[int]) -> float:
    """SE / log n, from 0 to 1, of a group's classes [n]; 0 where n is 0 or 1.

    It is 1 - sum_c n_c log n_c / (n log n). Both ends are exact: one class has 0.0, n classes have 1.0.
    """
    n = len(classes)
    if n < 2:
        return 0.0
    return 1.0 - math.fsum(m * math.log(m) for m in Counter(classes).values()) / (n * math.log(n))


def semantic_entropy(classes: Sequence[int]) -> float:
    """SE in nats, of a group's classes [n]."""
    return normalised_entropy(classes) * math.log(max(1, len(classes)))


def scaled_by_entropy(A: np.ndarray, groups: Sequence[Sequence[int]], alpha: float) -> np.ndarray:
    """The advantages [P, G], each group scaled by 1 - alpha SE / log n. groups [P]: classes of each group."""
    return A * np.array([[1.0 - alpha * normalised_entropy(classes)] for classes in groups])
