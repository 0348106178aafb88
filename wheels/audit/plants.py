"""Cuts the plants out of a fault's file, as the wheel has it: the words and the prediction are left.

A plant draws a faulty log with a model of transformers, for tests and benchmarks. An audit needs none. What
is cut leaves empty lines, so that a line has the same number as in the repository.
"""

import ast
from pathlib import Path

# The package of what plants are planted in.
PLANTING = "planting"


def has_plants(file: Path) -> bool:
    """Whether a file is a fault's: it lies in a room of audit/faults/."""
    return file.parent.parent.parts[-2:] == ("audit", "faults") and file.parent.name != PLANTING


def without_plants(source: str) -> str:
    """The source without `plants`, and without what only these need."""
    tree = ast.parse(source)
    cut: list[ast.AST] = [
        keyword
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        for keyword in statement.value.keywords
        if keyword.arg == "plants"
    ]
    left = list(tree.body)
    names = set().union(*map(_names, cut))
    used = {x: _used(x, cut) for x in left}
    while gone := [
        x
        for x in left
        if _defined(x) and _defined(x) <= names.difference(*(used[y] for y in left if y is not x))
    ]:
        cut += gone
        left = [x for x in left if x not in gone]
        names = names.union(*map(_names, gone))
    # Only plants are annotated with what they are planted in.
    cut += [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and PLANTING in (x.module or "")]
    cut += [x for x in tree.body if isinstance(x, ast.If) and all(y in cut for y in x.body)]
    lines = source.splitlines(keepends=True)
    for node in cut:
        for number in range(_first_line(node) - 1, node.end_lineno):
            lines[number] = "\n"
    return "".join(lines)


def _first_line(node: ast.AST) -> int:
    return min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module gives; empty for one that is more than that."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return set().union(*map(_names, targets))
    return set()


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _used(statement: ast.stmt, cut: list[ast.AST]) -> set[str]:
    """The names that a statement uses, outside of what is cut."""
    used, waiting = set(), [statement]
    while waiting:
        node = waiting.pop()
        if node not in cut:
            used |= {node.id} if isinstance(node, ast.Name) else set()
            waiting += ast.iter_child_nodes(node)
    return used
