"""The wheel zerokl-audit: which files it has, what they import, and the doors to what it has not."""

import ast
import builtins
import importlib
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from zerokl.audit.frameworks import FRAMEWORKS
from zerokl.cli import app
from zerokl.cli.command_line import OF_THE_TRAINER
from zerokl.verify.run_environment import PACKAGE_ROOT

sys.path.insert(0, str(PACKAGE_ROOT / "wheels" / "audit"))
shipped = importlib.import_module("shipped")


@cache
def files() -> dict[str, Path]:
    """The wheel's modules and their files."""
    return shipped.shipped()


# The rooms of the wheel.
ROOMS = {
    "",
    "audit",
    "audit.capsule",
    "audit.conclusion",
    "audit.engines",
    "audit.faults",
    "audit.faults.columns",
    "audit.faults.draws",
    "audit.faults.ids",
    "audit.faults.model",
    "audit.faults.numbers",
    "audit.faults.operations",
    "audit.faults.signal",
    "audit.figures",
    "audit.formats",
    "audit.frameworks",
    "audit.hypotheses",
    "audit.knobs",
    "audit.logs",
    "audit.operations",
    "audit.page",
    "cli",
    "engine",
    "engine.config",
    "engine.display",
    "engine.processes",
    "engine.rollout",
    "engine.rollout.vllm",
    "engine.tasks",
    "files",
    "integrations",
    "kernels",
    "kernels.cpp",
    "model",
    "model.blocks",
    "model.families",
    "pages",
    "verify",
}
# What a log is audited with: the dependencies of the wheel, and the standard library.
WITHOUT_A_MODEL = {"numpy", "pydantic", "pydantic_core", "cyclopts", "rich", "filelock", "tomli_w", "tomli"}
# Blocks in which an import need not be the wheel's: file, and what the import is of.
DOORS = {
    ("cli/__init__.py", "runs, models, checks"),
    ("cli/audits.py", "Pair, find_target, pair_config, run_gradient_bias"),
    ("cli/audits.py", "audit_apart"),
    ("cli/audits.py", "audit_run, sentences"),
    ("cli/audits.py", "check_draws"),
    ("cli/audits.py", "diff"),
}


def room(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE_ROOT).parent.parts)


def test_the_wheel_has_these_rooms_and_no_others():
    assert {room(file) for file in files().values()} == ROOMS
    assert len(files()) > 200
    assert sum(file.stat().st_size for file in files().values()) < 2_600_000


def test_the_wheel_has_every_framework_and_its_recorder():
    for framework in FRAMEWORKS.values():
        assert f"audit.frameworks.{framework.name.replace('-', '_')}" in files()
        if framework.recording:
            assert f"integrations.{framework.recording.recorder.partition(':')[0]}" in files()


def undefined(tree: ast.Module) -> set[str]:
    """The names that are used in a file and given nowhere in it."""
    nodes = list(ast.walk(tree))
    given = {x.arg for x in nodes if isinstance(x, ast.arg)} | set(dir(builtins)) | {"__package__"}
    given |= {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    given |= {
        a.asname or a.name for x in nodes if isinstance(x, ast.Import | ast.ImportFrom) for a in x.names
    }
    names = [x for x in nodes if isinstance(x, ast.Name)]
    given |= {x.id for x in names if isinstance(x.ctx, ast.Store)}
    return {x.id for x in names} - given


def test_a_fault_is_shipped_without_its_plants_and_whole_otherwise():
    fault_files = [x for x in files().values() if shipped.has_plants(x) and x.name != "__init__.py"]
    assert len(fault_files) > 60
    for file in fault_files:
        source = file.read_text()
        assert shipped.text(file).count("\n") == source.count("\n")
        assert undefined(ast.parse(shipped.text(file))) == set(), file
        package = f"zerokl.{room(file)}"
        module = importlib.import_module(f"{package}.{file.stem}")
        names = {"__name__": f"{package}.{file.stem}", "__package__": package}
        exec(compile(shipped.text(file), file, "exec"), names)
        kind = "FAULT" if hasattr(module, "FAULT") else "CHANGED"
        for field in fields(names[kind]):
            cut, whole = getattr(names[kind], field.name), getattr(module, kind)
            whole = getattr(whole, field.name)
            assert cut == () if field.name == "plants" else callable(cut) or cut == whole, (file, field.name)
        assert "planting" not in shipped.text(file)


def test_control_what_a_prediction_needs_stays_and_a_lost_name_is_found():
    source = (
        "import math\nimport json\ndef shared(): return math.pi\ndef plant(w): return shared() + json.x\n"
        "FAULT = Checked(\n    look=shared,\n    plants=(Plant(make=plant),),\n)\n"
    )
    cut = shipped.without_plants(source)
    assert "".join(cut.split()) == "importmathdefshared():returnmath.piFAULT=Checked(look=shared,)"
    assert undefined(ast.parse(cut)) == {"Checked"}
    assert undefined(ast.parse(cut.replace("import math", ""))) == {"Checked", "math"}


def test_every_import_of_a_shipped_file_is_of_a_shipped_file():
    for name, file in files().items():
        for wanted in shipped.imported(file):
            module = wanted if shipped.module_file(wanted) else wanted.rpartition(".")[0]
            assert module in files(), f"{name} imports {wanted}"


# Names of the standard library that Python 3.10 has not, among those that were used here.
AFTER_3_10 = {"StrEnum", "Self", "file_digest", "assert_never", "NotRequired", "Required", "TaskGroup"}


def newer_than_3_10(tree: ast.Module) -> set[str]:
    """What Python 3.10 has not: names, and the imports of tomllib outside of a question of the version."""
    asked = {
        n for x in tree.body if isinstance(x, ast.If) and "version_info" in ast.dump(x.test) for n in x.body
    }
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names} & AFTER_3_10
        elif isinstance(node, ast.Attribute):
            names |= {node.attr} & AFTER_3_10
        elif isinstance(node, ast.Import) and node not in asked:
            names |= {alias.name for alias in node.names} & {"tomllib"}
    return names


@pytest.mark.full
def test_the_files_are_for_python_3_10():
    for name, file in files().items():
        assert newer_than_3_10(shipped.parsed(file)) == set(), name


@pytest.mark.parametrize("line", ["from enum import StrEnum", "import tomllib", "hashlib.file_digest(x, y)"])
def test_control_what_python_3_10_has_not_is_found(line):
    assert newer_than_3_10(ast.parse(line))


@pytest.mark.full
def test_the_doors_are_these():
    doors = set()
    for file in files().values():
        tree = shipped.parsed(file)
        walked = {node.lineno for node in shipped.imports(tree)}
        behind = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.lineno not in walked]
        typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        for_types = {n.lineno for block in typing for n in ast.walk(block) if isinstance(n, ast.ImportFrom)}
        doors |= {
            (str(file.relative_to(PACKAGE_ROOT)), ", ".join(a.name for a in node.names))
            for node in behind
            if node.lineno not in for_types
        }
    assert doors == DOORS


def test_control_an_import_before_the_door_and_a_new_room_are_found(tmp_path):
    for folder in ("audit", "engine", "engine/train"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "engine" / "train" / "step.py").write_text("")
    file, line = tmp_path / "audit" / "a.py", "    from ..engine.train.step import x\n"
    for text, is_shipped in (
        (f"def f():\n    needs_trainer('x')\n{line}", False),
        (f"def f():\n{line}    needs_trainer('x')\n", True),
        (f"if has_trainer():\n{line}", False),
        (f"if other():\n{line}", True),
        (f"if TYPE_CHECKING:\n{line}", False),
        (f"def f():\n    needs_trainer('x')\ndef g():\n{line}", True),
    ):
        file.write_text(text)
        shipped.parsed.cache_clear()
        assert ("engine.train.step" in shipped.shipped(tmp_path, ("audit.a",))) == is_shipped, text


def test_a_log_is_audited_with_the_dependencies_of_the_wheel_and_no_more():
    """The modules that `zerokl audit LOG`, `diff` and `convert` load, at their beginning and inside."""
    code = (
        "import sys; from zerokl.cli import main; import zerokl.audit.command, zerokl.audit.logs.log_diff, "
        "zerokl.audit.logs.convert, zerokl.integrations.recorder, zerokl.integrations.verl; "
        "print(*{m.partition('.')[0] for m in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "safetensors", "triton"} & set(loaded.split())
    assert {"numpy", "pydantic", "cyclopts", "rich"} <= set(loaded.split())
    roots = ("audit.command", "audit.logs.log_diff", "audit.logs.convert", "cli", "integrations.recorder")
    roots += tuple(f"audit.frameworks.{name}" for name in shipped.FRAMEWORKS)
    assert third_party_at_the_top(roots) <= WITHOUT_A_MODEL


def third_party_at_the_top(roots: tuple[str, ...]) -> set[str]:
    """The packages that modules import when they are loaded, and all that these load of ours."""
    packages, seen, waiting = set(), set(), list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in files():
            continue
        seen.add(name)
        tree = shipped.parsed(files()[name])
        for node in (n for n in shipped.imports(tree) if not n.col_offset):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*room(files()[name]).split(".")]
                base = base[: len(base) - node.level + 1] + (node.module.split(".") if node.module else [])
                waiting += [".".join(base), *(".".join([*base, a.name]) for a in node.names)]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                packages |= {name.partition(".")[0] for name in names}
    return {name for name in packages if name not in sys.stdlib_module_names}


def test_the_commands_that_only_zerokl_has_are_listed():
    names = {name for name in app if not name.startswith("-")}
    assert names - OF_THE_TRAINER == {"audit", "capsule", "convert", "diff", "record"}
    assert names > OF_THE_TRAINER


@pytest.mark.parametrize(
    ("versions", "trainer", "refused"),
    [
        ({"zerokl": "1", "zerokl-audit": "1"}, True, ""),
        ({"zerokl": "1", "zerokl-audit": "2"}, True, "are of versions 1 and 2"),
        ({"zerokl": "1", "zerokl-audit": "1"}, False, "lie in two folders"),
        ({"zerokl": "1", "zerokl-audit": None}, True, ""),
        ({"zerokl": None, "zerokl-audit": "1"}, False, ""),
    ],
)
def test_both_distributions_together_are_one_version_or_refused(monkeypatch, versions, trainer, refused):
    installed = importlib.import_module("zerokl.files.installed")
    monkeypatch.setattr(installed, "installed_version", versions.get)
    monkeypatch.setattr(installed, "has_trainer", lambda: trainer)
    if refused:
        with pytest.raises(ValueError, match=f"{refused}; pip uninstall zerokl-audit"):
            installed.check_together()
    else:
        installed.check_together()
