"""Scripts and commands of these tests, as forks of a process that has imported vLLM."""

import subprocess
from pathlib import Path

from zerokl.engine.rollout.vllm.sampler import prepare_vllm

from tests import forked

IMPORTS = f"{__name__}:imports"


def imports() -> None:
    """What starts an engine imports, also later than `import vllm` does."""
    prepare_vllm(False)
    from vllm import LLM  # noqa: F401

    forked.imports()


def run_python(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As subprocess.run of Python with these words; vLLM keeps its threads and settings for good."""
    return forked.run_python(*words, stdin=stdin, preload=IMPORTS)


def run_ranks(n: int, words: list[str], folder: Path) -> str:
    """As that of tests/forked.py."""
    return forked.run_ranks(n, words, folder, IMPORTS)
