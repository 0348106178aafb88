"""The names of samplers. A name means the same engine in every command, setting, message, log and page."""

from collections.abc import Mapping
from typing import Literal

# Name -> which engine draws. The helps of `train` and `audit` and the table in docs/vllm.md show these lines.
SAMPLERS: dict[str, str] = {
    "native": "zerokl's own sampler",
    "hf": "transformers as it comes: its own model and its generate",
    "vllm": "vLLM as it comes: its own model, attention and draw",
    "vllm-exact": "vLLM's own model in batch-invariant mode, whose bits zerokl's kernels match on a GPU",
    "vllm-zerokl": "vLLM with zerokl's decoder, attention and draw inside, through its plugin points",
}
SamplerName = Literal[tuple(SAMPLERS)]  # type: ignore[valid-type]
# Samplers with arithmetic and random numbers of their own: no trainer has their bits.
EXTERNAL = ("hf", "vllm")

# Names that stand for no engine any more: what to write instead, as the end of a message about the name.
RENAMED = {
    "vllm-stock": 'is no sampler any more; with exact = true write "vllm-exact" (vLLM\'s own model in '
    'batch-invariant mode), with exact = false "vllm" (vLLM as it comes)'
}


def listed(lines: Mapping[str, str]) -> str:
    """Names with their lines, as a help shows them: `native (zerokl's own sampler); hf (...)`."""
    return "; ".join(f"{name} ({line})" for name, line in lines.items())
