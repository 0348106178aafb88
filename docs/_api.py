"""The page of the Python API: signatures, fields and docstrings, as they stand in the source.

Nothing is imported but the table of public names, so that the page is the same wherever it is made.
"""

import ast
import re
from functools import cache
from pathlib import Path

import zerokl

from ._definitions import ROOT
from ._markdown import PART, prose

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_names() -> str:
    """Every public name of the package, in the order of its table."""
    return "\n".join(_documented(module, name) for name, module in zerokl._NAMES.items())


def imported_names() -> str:
    """Every other name that a page or an example imports from zerokl, by module."""
    docs = ROOT / "docs"
    texts = [PART.sub("", page.read_text()) for page in docs.rglob("*.md")]
    texts += [example.read_text() for example in docs.glob("examples/**/*.py")]
    names: dict[str, set[str]] = {}
    for module, imported in re.findall(
        r"^from zerokl\.([\w.]+) import (\w+(?:, \w+)*)$", "\n".join(texts), re.M
    ):
        names.setdefault(module, set()).update(imported.split(", "))
    parts = []
    for module in sorted(names):
        description = ast.get_docstring(_tree(_file(module))) or ""
        parts += [f"### `zerokl.{module}`", "", prose(_first_sentence(description)), ""]
        parts += [_documented(module, name, "####") for name in sorted(names[module])]
    return "\n".join(parts)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", " ".join(text.split()))[0]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _definition(module: str, name: str) -> tuple[Path, _Definition]:
    """The file and the node of a name, also where the module has it from another one."""
    path = _file(module)
    for node in _tree(path).body:
        if isinstance(node, _Definition) and node.name == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            package = path.relative_to(ROOT).parts[: -node.level]
            return _definition(".".join([*package, *(node.module or "").split(".")]), name)
    raise ValueError(f"{path} does not define {name}")


def _documented(module: str, name: str, heading: str = "###") -> str:
    """A name with its signature, its docstring, and those of its methods."""
    path, node = _definition(module, name)
    source = path.read_text().splitlines()
    relative = path.relative_to(ROOT).as_posix()
    parts = [f"{heading} `{name}`", "", *_entry(node, source)]
    if isinstance(node, ast.ClassDef):
        for method in _methods(node):
            parts += _entry(method, source)
    return "\n".join([*parts, f"Source: [`{relative}::{name}`](../{relative})", ""])


def _methods(node: ast.ClassDef) -> list[_Definition]:
    """The public methods of a class that say what they do."""
    return [
        method
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not method.name.startswith("_")
        and ast.get_docstring(method)
    ]


def _entry(node: _Definition, source: list[str]) -> list[str]:
    signature = _class_signature(node, source) if isinstance(node, ast.ClassDef) else _header(node, source)
    return ["```python", signature, "```", "", *_description(node)]


def _header(node: _Definition, source: list[str]) -> str:
    """The lines of a definition before its body, with `@property` and the like."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source[first - 1 : node.body[0].lineno - 1]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines).rstrip().removesuffix(":")


def _class_signature(node: ast.ClassDef, source: list[str]) -> str:
    """What makes an object: the parameters of `__init__`, or the fields of a dataclass or named tuple."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            header = _header(method, source).removesuffix(" -> None")
            return re.sub(r"^def __init__\((\s*)self,?\s*", rf"class {node.name}(\1", header)
    fields = [ast.get_source_segment("\n".join(source), field) for field in _fields(node)]
    return "\n    ".join([f"class {node.name}" + (":" if fields else ""), *fields])


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The public fields of a dataclass or named tuple. Those of a model are keys of the configuration."""
    kinds = {ast.unparse(part).partition("(")[0] for part in [*node.decorator_list, *node.bases]}
    if kinds.isdisjoint({"dataclass", "NamedTuple"}):
        return []
    return [f for f in node.body if isinstance(f, ast.AnnAssign) and not f.target.id.startswith("_")]


def _description(node: _Definition) -> list[str]:
    """A docstring as Markdown. Paragraphs that explain parameters become lists."""
    names = "|".join(_parameters(node)) or "-"
    start = rf"(?:^|(?<=[.;] ))((?:{names})(?:, (?:{names}))*)((?: \[[^\]]*\])?): "
    lines = []
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        text = " ".join(paragraph.split())
        if re.match(start, text):
            _, *items = re.split(start, text)
            for item, shape, meaning in zip(items[::3], items[1::3], items[2::3], strict=True):
                lines.append(f"- `{item}`{shape}: {prose(meaning)}")
            lines.append("")
        elif paragraph.startswith("    "):  # an example
            lines += ["```python", *(line.removeprefix("    ") for line in paragraph.split("\n")), "```", ""]
        elif text:
            lines += [prose(text), ""]
    return lines


def _parameters(node: _Definition) -> list[str]:
    """The parameters of a function, or what a class is made with."""
    if isinstance(node, ast.ClassDef):
        inits = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
        return _parameters(inits[0]) if inits else [field.target.id for field in _fields(node)]
    arguments = node.args
    last = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *last]]
