"""The threads of gloo, torch's sender between processes of a CPU."""

from pathlib import Path


def gloo_threads() -> list[str]:
    """Those of this process. One that is left may abort it at the interpreter's end."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]
