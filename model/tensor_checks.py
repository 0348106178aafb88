"""What is refused of the tensors of a checkpoint or an adapter, by name, while they are read."""

from collections.abc import Iterable

import torch


def check_finite(source: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor with a NaN or an infinity. source: what begins the error's line.

    A choice may hide one: a router's top-k, an argmax, a token that nobody draws.
    """
    # One pass that takes a tenth of the time of isfinite. A NaN is the least and the largest of all.
    if not all(x.isfinite() for x in torch.aminmax(tensor)):
        bad = tensor.numel() - int(tensor.isfinite().sum())
        raise ValueError(
            f"{source}: {name} holds {bad} NaN or infinite numbers of {tensor.numel()}; give weights from "
            "before they broke"
        )


def but_for_the_prefix(name: str, wanted: Iterable[str]) -> str:
    """What a tensor's name without a place seems to mean, as the end of an error's line; or empty.

    Wrappers write prefixes: torch.compile _orig_mod., DDP module., PEFT base_model.model.
    """
    for other in wanted:
        longer, shorter = (name, other) if len(name) > len(other) else (other, name)
        if longer.endswith(f".{shorter}"):
            verb = "drop" if longer == name else "add"
            prefix = longer.removesuffix(shorter)
            return f"; it is {other} but for the prefix: {verb} {prefix[:100]} in the names"
    return ""
