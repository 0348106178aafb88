"""The loops of the CPU in C++: what the references do in many passes over memory, in one.

They compute what the references compute, bit for bit (a NaN may have others): operations that IEEE 754 rounds
exactly, in the references' order. exp, log and sqrt stay torch's. Where an order is a library's (that of row
sums and products), a probe must find it to be that of the loops. So nothing here decides a bit. Where no
compiler is found, or the CPU has no AVX2, the references run alone (backend.on_cpp).

The loops are compiled once for a CPU and a compiler, when the first operation asks, in a few seconds. The
library stays in the user's cache. ZEROKL_CPP=0 turns it off.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from ...files.inputs import read_bytes

SOURCES = Path(__file__).parent
# No contraction: a product and a sum are fused only where a chain of chains.h says so.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
# The arguments of each function: p a pointer, i an int64, f a float.
_ARGUMENTS = {
    "norm_means": "pipppiiifi",
    "norm_scale": "pippppiiii",
    "norm_bwd": "ppippppppiiiii",
    "row_sums": "ppiii",
    "pack_panels": "piipii",
    "matmul_panels": "pppiiipii",
    "silu_minus_gate": "ppii",
    "silu_fwd": "pppii",
    "silu_bwd": "ppppii",
    "gelu_minus_gate": "ppii",
    "gelu_bwd": "ppppii",
    "rope": "pippfpiii",
    "heads_to_cache": "ppppppppppiiiiii",
    "attention_scores": "ppipifpiiiippp",
    "attention_outputs": "pppipiiiipppipp",
    "attention_exponents": "ppipipfiiip",
    "attention_bwd_sizes": "pip",
    "attention_gradients": "pppippipfiipppp",
    "add_columns": "pppiii",
    "sum_heads": "ppiiiii",
    "uniforms": "ppiii",
    "draw_shift": "ppii",
    "draw_ids": "ppppppiiii",
}
_RESULTS = {"heads_to_cache": ctypes.c_int64}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_DTYPES = {torch.float32: "_float32", torch.bfloat16: "_bfloat16"}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None where they are turned off or cannot be compiled."""
    if os.environ.get("ZEROKL_CPP") == "0" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    target = _target(compiler) if compiler and shutil.which(compiler[0]) else ""
    if not all(f"#define {macro} " in target for macro in ("__AVX2__", "__FMA__")):
        return None
    sources = sorted(f for f in SOURCES.iterdir() if f.suffix in (".cpp", ".h"))
    key = hashlib.sha256(target.encode() + repr(_FLAGS).encode())
    for file in sources:
        key.update(read_bytes(file))
    path = _folder() / f"loops-{key.hexdigest()[:16]}.so"
    try:
        if not path.exists() and not _compiled(compiler, [f for f in sources if f.suffix == ".cpp"], path):
            return None
        return ctypes.CDLL(str(path))
    except OSError:  # the folder cannot be read, written or run from
        return None


def call(name: str, dtype: torch.dtype | None, *arguments: torch.Tensor | int | float | None) -> int | None:
    """Call a function of the library, of those for `dtype` where it has several.

    A tensor is passed by its address, and None as a null pointer. The caller sees to shapes and strides.
    """
    return _function(name, dtype)(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments))


@cache
def _function(name: str, dtype: torch.dtype | None) -> Callable[..., int | None]:
    function = getattr(library(), name + ("" if dtype is None else _DTYPES[dtype]))
    function.argtypes, function.restype = [_TYPES[letter] for letter in _ARGUMENTS[name]], _RESULTS.get(name)
    return function


def _target(compiler: list[str]) -> str:
    """The macros that the compiler defines for this CPU: its version and what the CPU has."""
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _folder() -> Path:
    """Where compiled libraries stay."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "zerokl"


def _compiled(compiler: list[str], files: list[Path], path: Path) -> bool:
    """Whether the files were compiled into `path`, which appears at once and whole.

    What a compiler said that failed stays beside it, with the ending .log, and it is not asked again. Raises
    OSError where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One of the processes of a run compiles, and the others wait for it.
    with FileLock(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        failed, made = path.with_suffix(".log"), Path(scratch) / path.name
        if not path.exists() and not failed.exists():
            command = [*compiler, *_FLAGS, *map(str, files), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, check=False)
            if result.returncode == 0:
                made.replace(path)
            else:
                failed.write_bytes(result.stderr)
    return path.exists()
