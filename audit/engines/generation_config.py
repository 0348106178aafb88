"""What a checkpoint's generation_config.json asks for. vLLM and transformers obey it unless told not to."""

from pathlib import Path
from typing import Any

from ...files.reading import read_json

NAME = "generation_config.json"
# What changes the distribution, by its name in the file, and the value that changes nothing.
_PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def generation_defaults(folder: Path) -> dict[str, float]:
    """The values that change the distribution, in the order of `_PLAIN`; empty where there is none.

    Raises OSError and ValueError for a file that cannot be read, or is no JSON.
    """
    path = folder / NAME
    values: dict[str, Any] = read_json(path) if path.exists() else {}
    numbers = {name: values.get(name) for name in _PLAIN}
    types = {"top_k": (int,)}
    known = {name: x for name, x in numbers.items() if type(x) in types.get(name, (int, float))}
    return {name: x for name, x in known.items() if x != _PLAIN[name]}


def not_obeyed(folder: Path, sampler: str) -> list[str]:
    """That an audit's sampler drew without these values, as a note of a report; none where there are none."""
    if not (given := generation_defaults(folder)):
        return []
    asked_values = ", ".join(f"{name} {value:g}" for name, value in given.items())
    return [
        f"The checkpoint's {NAME} asks for {asked_values}. {sampler} drew here without it: with the settings "
        "of this audit alone. Where your own sampler obeys it, give the audit the same values "
        "(--temperature, --top_p, --top_k, --min_p), or switch it off there (vLLM: generation_config='vllm')."
    ]
