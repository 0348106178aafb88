"""The modules of kernels/ that launch, whose `launch` a test may replace."""

from importlib import import_module
from pathlib import Path

import zerokl.kernels as kernels
from zerokl.kernels.launch import launch

_MODULES = [
    import_module(f"{kernels.__name__}.{path.stem}")
    for path in sorted(Path(kernels.__path__[0]).glob("*.py"))
]
LAUNCHERS = [module for module in _MODULES if getattr(module, "launch", None) is launch]
