"""Whether vLLM is there."""

from importlib.util import find_spec
from pathlib import Path

from zerokl.benchmarks.machine import Row


def has_vllm() -> bool:
    """Whether vLLM can be imported, its compiled operations too. Its Python files alone are not enough."""
    spec = find_spec("vllm")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return any(list(folder.glob("_C*.so")) for folder in folders)


def without_vllm(what: str) -> Row:
    """The row of what needs it."""
    return {"what": f"{what}: not compared (vLLM with its compiled operations is not installed)"}
