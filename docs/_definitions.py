"""Where a file defines a name. It needs nothing but Python, so that a test can ask without Sphinx."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def definitions(path: str) -> dict[str, int]:
    """Name -> line, of every function, class and variable that a Python file defines.

    path: from the repository's root. A name is written as in the file (`train_step`), or with its class or
    function before it (`Policy.sample`). Of several definitions of one name the outermost one counts, then
    the first. The line is that of `def`, `class` or the assignment, decorators not counted.
    """
    lines: dict[str, tuple[int, int]] = {}
    for depth, qualified, line in _walk(ast.parse((ROOT / path).read_text()), "", 0):
        for name in {qualified, qualified.rpartition(".")[2]}:
            if name not in lines or (depth, line) < lines[name]:
                lines[name] = depth, line
    return {name: line for name, (_, line) in lines.items()}


def _walk(node: ast.AST, prefix: str, depth: int) -> Iterator[tuple[int, str, int]]:
    """(depth, name with what it stands in, line) of every definition below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield depth, prefix + child.name, child.lineno
            yield from _walk(child, f"{prefix}{child.name}.", depth + 1)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield depth, prefix + name.id, child.lineno
        else:
            yield from _walk(child, prefix, depth)


def line_of(path: str, name: str) -> int | None:
    """The line on which the file defines the name, or None."""
    return definitions(path).get(name) if path.endswith(".py") else None
