"""Scripts and commands of these tests, as forks of a process that has imported vLLM."""

import subprocess
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from zerokl.engine.rollout.vllm.sampler import prepare_vllm

from tests import forked

IMPORTS = f"{__name__}:imports"


# What an engine imports as it starts. Another release may have it elsewhere, and then each fork imports it.
_LATER = (
    "v1.engine.llm_engine",
    "v1.worker.cpu_worker",
    "model_executor.layers.quantization.compressed_tensors.compressed_tensors",
)


def imports() -> None:
    """What the forks share."""
    prepare_vllm(False)
    from vllm import LLM  # noqa: F401

    for name in _LATER:
        with suppress(ImportError):
            import_module(f"vllm.{name}")
    forked.imports()


def run_python(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As subprocess.run of Python with these words; vLLM keeps its threads and settings for good."""
    return forked.run_python(*words, stdin=stdin, preload=IMPORTS)


def run_ranks(n: int, words: list[str], folder: Path) -> str:
    """As that of tests/forked.py."""
    return forked.run_ranks(n, words, folder, IMPORTS)
