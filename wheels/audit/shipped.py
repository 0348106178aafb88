"""The files of the wheel zerokl-audit: what it is for, and all that these import.

An import below a call of needs_trainer in the same block, or inside of `if has_trainer():`, leads to what
only `zerokl` has (files/installed.py). It is a door, and is not followed.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from plants import has_plants, without_plants

# The package's root, from this file.
ROOT = Path(__file__).resolve().parents[2]
# The frameworks' files, which audit/frameworks/__init__.py finds by listing the folder. The recorder of one
# lies in integrations/, under the same name.
FRAMEWORKS = [file.stem for file in sorted((ROOT / "audit" / "frameworks").glob("[!_]*.py"))]
# What the wheel is for: the command line, and the recorders.
ENTRIES = (
    "__main__",
    "cli",
    "integrations.recorder",
    # vLLM loads it by its entry point where it is a sampler.
    "engine.rollout.vllm.plugin",
    *(f"{room}.{name}" for name in FRAMEWORKS for room in ("audit.frameworks", "integrations")),
)
# Packages whose modules are found by their place: no import names them.
BY_PLACE = (
    "model.families",
    *(f"audit.faults.{x}" for x in ("columns", "draws", "ids", "model", "numbers", "operations", "signal")),
)
# Data beside the modules: package -> patterns.
DATA = {
    "audit.formats": ["log.schema.json"],
    "kernels.cpp": ["*.cpp", "*.h"],
    "pages": ["static/*"],
}


def module_file(name: str, root: Path = ROOT) -> Path | None:
    """The file of a module below the package, such as audit.page, or None; "" is the package itself."""
    path = root.joinpath(*name.split(".")) if name else root
    return next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()), None)


def shipped(root: Path = ROOT, entries: tuple[str, ...] = ENTRIES) -> dict[str, Path]:
    """The modules of the wheel, by name below the package, and their files. Sorted."""
    modules: dict[str, Path] = {}
    waiting = ["", *entries]
    for package in BY_PLACE:
        waiting += [f"{package}.{file.stem}" for file in root.glob(f"{package.replace('.', '/')}/[a-z]*.py")]
    while waiting:
        name = waiting.pop()
        file = module_file(name, root)
        if name in modules or file is None:
            continue
        modules[name] = file
        waiting.append(name.rpartition(".")[0])
        waiting += imported(file, root)
    return dict(sorted(modules.items()))


@cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax tree. Raises SyntaxError for what Python 3.10 cannot parse."""
    return ast.parse(text(file), feature_version=(3, 10))


def text(file: Path) -> str:
    """A file as the wheel has it: a fault's without its plants."""
    source = file.read_text(encoding="utf-8")
    return without_plants(source) if has_plants(file) else source


def imported(file: Path, root: Path = ROOT) -> set[str]:
    """What a file imports of the package behind no door: modules, and names that may be modules."""
    parts = ("zerokl", *file.relative_to(root).parent.parts)
    names = set()
    for node in imports(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        base = list(parts[: len(parts) - node.level + 1]) if node.level else []
        base += node.module.split(".") if node.module else []
        names |= {".".join(base)} | {".".join([*base, alias.name]) for alias in node.names}
    return {name.partition(".")[2] for name in names if name == "zerokl" or name.startswith("zerokl.")}


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a tree behind no door, those for type checkers left out."""
    for _, block in ast.iter_fields(tree):
        for node in block if isinstance(block, list) else [block]:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif isinstance(node, ast.If) and _calls(node.test) in ("TYPE_CHECKING", "has_trainer"):
                for other in node.orelse:
                    yield from imports(ast.Module([other], []))
            elif isinstance(node, ast.Expr) and _calls(node.value) == "needs_trainer":
                break
            elif isinstance(node, ast.AST):
                yield from imports(node)


def _calls(node: ast.AST) -> str:
    """The name that an expression is, or calls."""
    called = node.func if isinstance(node, ast.Call) else node
    return called.id if isinstance(called, ast.Name) else ""
