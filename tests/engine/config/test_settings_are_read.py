"""A setting that no source file reads changes nothing, and nobody would notice. Here it is noticed.

What counts is a read of a section's field outside of the rules: a rule refuses, and does nothing else. A read
in a method or a property of the section counts where that one is read in turn.
"""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import pytest
from pydantic import Field
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.section import Section, settings_of
from zerokl.engine.config.training_sections import OptimizerConfig
from zerokl.verify.run_environment import PACKAGE_ROOT

FLOORS = ("cli", "integrations", "audit", "engine", "model", "kernels")
# What the whole configuration is called where no annotation says so.
ALIASES = {"config", "cfg"}


@dataclass
class Names:
    """What a file says of names: who holds which type, what is assigned, and which attributes are read."""

    held: list[tuple[str, set[str]]] = field(default_factory=list)  # a name, and the types it is annotated by
    assigned: list[tuple[str, str]] = field(default_factory=list)  # a name, and the one that it gets
    read: list[tuple[str, str]] = field(default_factory=list)  # the name before a dot, and the one after it
    # Whose fields all become keywords of a call, `f(**x.model_dump())`: one that f does not take raises.
    dumped: list[str] = field(default_factory=list)
    # The methods of each section that is defined here: of each, the fields that it takes.
    members: dict[str, dict[str, set[str]]] = field(default_factory=dict)


def last_name(node: ast.AST) -> str:
    """The last name of an expression such as state.config.loss; that of what is called or subscripted."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    """The names that an assignment binds, each with the name of its value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from pairs(one, other)
    else:
        yield last_name(target), last_name(value)


def names_in(tree: ast.AST, sections: Collection[str]) -> Names:
    """What a file says. sections: the names of all sections' classes."""
    names, waiting = Names(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef) and node.name in sections:
            names.members[node.name] = dict(members(node))
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef):
            kind = node.returns if isinstance(node, ast.FunctionDef) else node.annotation
            name = {ast.arg: "arg", ast.FunctionDef: "name"}.get(type(node))
            types = {last_name(x) for x in ast.walk(kind)} & set(sections) if kind else set()
            names.held.append((getattr(node, name) if name else last_name(node.target), types))
        elif isinstance(node, ast.Assign):
            names.assigned += (pair for target in node.targets for pair in pairs(target, node.value))
        elif isinstance(node, ast.NamedExpr):
            names.assigned += pairs(node.target, node.value)
        elif isinstance(node, ast.Attribute):
            names.read.append((last_name(node.value), node.attr))
        elif isinstance(node, ast.keyword) and node.arg is None and last_name(node.value) == "model_dump":
            names.dumped.append(last_name(node.value.func.value))
    return names


def members(section: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """The methods of a section but its rules, and the names that each takes of it, also by getattr."""
    for method in section.body:
        if isinstance(method, ast.FunctionDef) and "rule" not in map(last_name, method.decorator_list):
            nodes = list(ast.walk(method))
            taken = {x.attr for x in nodes if isinstance(x, ast.Attribute) and last_name(x.value) == "self"}
            if any(last_name(x) == "getattr" for x in nodes):
                taken |= {str(x.value) for x in nodes if isinstance(x, ast.Constant)}
            yield method.name, taken


def read_of(section: type[Section], keys: set[str], files: list[Names]) -> set[str]:
    """The fields and methods of a section that are read. keys: the fields that are such a section."""
    classes = {kind.__name__ for kind in section.__mro__ if issubclass(kind, Section) and kind is not Section}
    read, methods = set(), {}
    for names in files:
        held = keys | {name for name, types in names.held if types & classes}
        held |= ALIASES if section.__name__.endswith("Config") and "Config" in classes else set()
        before = -1
        while before != len(held):
            before = len(held)
            held |= {name for name, value in names.assigned if value in held} - {""}
        read |= {name for holder, name in names.read if holder in held}
        read |= {name for holder in names.dumped if holder in held for name in section.model_fields}
        methods |= {name: taken for kind in classes for name, taken in names.members.get(kind, {}).items()}
    waiting = list(read)
    while waiting:
        more = methods.get(waiting.pop(), set()) - read
        read |= more
        waiting += more
    return read


def unread(model: type[Section], files: list[Names]) -> list[str]:
    """The settings of a configuration that no file reads, by key."""
    keys: dict[type[Section], set[str]] = {}
    for key, setting in settings_of(model).items():
        keys.setdefault(setting.section, set()).add(key.rpartition(".")[0].rpartition(".")[2])
    read = {section: read_of(section, names - {""}, files) for section, names in keys.items()}
    return [k for k, s in settings_of(model).items() if k.rpartition(".")[2] not in read[s.section]]


SECTIONS = {kind.__name__ for x in settings_of(Config).values() for kind in x.section.__mro__} | {
    "_Optimizer"
}


@pytest.fixture(scope="module")
def files() -> list[Names]:
    paths = [file for floor in FLOORS for file in (PACKAGE_ROOT / floor).rglob("*.py")]
    return [names_in(ast.parse(file.read_text()), SECTIONS) for file in paths]


def test_each_setting_is_read_by_a_source_file(files):
    assert unread(Config, files) == []


class _Optimizer(OptimizerConfig):
    forgotten: int = Field(3, ge=0)
    refused_only: int = Field(3, ge=0)
    unused: int = Field(3, ge=0)
    used: int = Field(3, ge=0)


class _Config(Config):
    optimizer: _Optimizer = _Optimizer()


SOURCE = """
class _Optimizer(OptimizerConfig):
    @rule
    def _refused(self, run):
        return self.refused_only > 3

    @property
    def never_called(self):
        return self.unused

    @property
    def called(self):
        return self.used

def f(config, batch):
    return config.optimizer.called + batch.forgotten
"""


def test_control_a_setting_that_nothing_reads_or_only_a_rule_or_a_dead_property_is_found(files):
    keys = unread(_Config, [*files, names_in(ast.parse(SOURCE), SECTIONS)])
    assert keys == [f"optimizer.{name}" for name in ("forgotten", "refused_only", "unused")]


def test_control_settings_whose_readers_are_taken_away_are_found(files):
    keys = {"prompts", "loss.clip_low", "optimizer.min_lr_ratio", "vllm.block_tokens"}
    names = {key.rpartition(".")[2] for key in keys}
    others = [replace(x, read=[pair for pair in x.read if pair[1] not in names]) for x in files]
    assert keys <= set(unread(Config, others))
