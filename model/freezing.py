"""Which weights a list of name patterns freezes."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate

from .config import ModelConfig
from .weights import Entry, Layout


def frozen_weights(config: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """The weights of a layout (weights.py) that the patterns name.

    patterns: of fnmatch, for names in the checkpoint. With tied embeddings, lm_head.weight is another name of
    the embedding.

    Raises ValueError for a pattern that matches nothing, for one that matches a part of a matrix (q, k and v
    are one matrix, gate and up are one, and so are those of all experts of a layer), and where nothing is
    left to train.
    """
    layout = Layout(config)
    weight_of = {part: entry.name for entry in layout.entries.values() for part, _ in entry.parts}
    if config.tied:
        weight_of["lm_head.weight"] = "embed"
    matched: set[str] = set()
    for pattern in patterns:
        names = [name for name in weight_of if fnmatchcase(name, pattern)]
        if not names:
            near = _nearest(pattern, list(weight_of))
            raise ValueError(f"frozen ({pattern!r}): matches no weight of the model; did you mean {near!r}?")
        matched.update(names)
    frozen = frozenset(weight_of[name] for name in matched)
    for entry in layout.entries.values():
        if entry.name in frozen:
            _refuse_part(entry, matched)
    if frozen == layout.entries.keys():
        raise ValueError(f"frozen ({', '.join(patterns)}): no weight is left to train; leave a pattern out")
    return frozen


def _refuse_part(entry: Entry, matched: set[str]) -> None:
    """Raise ValueError where some parts of a weight are matched, and others are not."""
    parts = [part for part, _ in entry.parts]
    frozen = [part for part in parts if part in matched]
    if frozen and len(frozen) < len(parts):
        others = [part for part in parts if part not in frozen]
        raise ValueError(f"frozen ({_few(frozen)}): is one matrix with {_few(others)}; freeze all or none")


def _few(names: Sequence[str]) -> str:
    """Names in a message. Of many, as the experts of a layer have, the first and their number."""
    return " and ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 1} more"])


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """The name that is spelt most similarly to a pattern, or the pattern of all names that begin alike."""
    beginnings = (start for name in names for start in accumulate(name.split("."), lambda a, b: f"{a}.{b}"))
    candidates = dict.fromkeys([*names, *(f"{start}.*" for start in beginnings if start not in names)])
    return get_close_matches(pattern, candidates, 1, 0.0)[0]
