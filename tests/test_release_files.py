"""CONTRIBUTING.md, SECURITY.md, CITATION.cff and the workflow name what is there; the package has it all."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from zerokl.verify.run_environment import PACKAGE_ROOT as ROOT

from tests.test_floors import FLOORS

sys.path.insert(0, str(ROOT / "tests" / "package"))
check = importlib.import_module("check")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
PAGES = ("CONTRIBUTING.md", "SECURITY.md")
TARGETS = set(re.findall(r"^([a-z][\w.-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
# What loads a pickle, or has a library do it. Connection.recv(), without an argument, does, too.
LOADS_PICKLE = re.compile(
    r"(pickle|dill|joblib|shelve|marshal|torch)\.(load|loads|open)|(\w+\.)*(Unpickler|read_pickle"
    r"|ProcessPoolExecutor|Pool|(all_gather|gather)_object|(broadcast|scatter|send|recv)_object_list)"
)
MAY_LOAD = re.compile(
    r"pickle|dill|joblib|shelve|marshal|torch\.load|Pool\(|PoolEx|_object(_list)?\(|recv\(\)"
)


def jobs(workflow: str) -> list[tuple[dict, dict[str, str]]]:
    """Each job of a workflow, once for each row of its matrix."""
    all_jobs = yaml.safe_load(workflow)["jobs"].values()
    return [(job, row) for job in all_jobs for row in job["strategy"]["matrix"]["include"]]


def make_targets(workflow: str) -> set[str]:
    """What the workflow gives to make, with the values of its matrix."""
    targets = set()
    for job, row in jobs(workflow):
        for step in job["steps"]:
            script = step.get("run", "")
            for name, value in row.items():
                script = script.replace("${{ matrix." + name + " }}", value)
            targets |= set(re.findall(r"\bmake ([\w.-]+)", script))
    return targets


def test_the_workflow_makes_what_the_makefile_has():
    assert make_targets(WORKFLOW) == {"lint", "test", "docs", "wheels"} <= TARGETS


def test_control_a_target_that_is_none_is_found():
    assert make_targets(WORKFLOW.replace("target: docs", "target: dosc")) - TARGETS == {"dosc"}


def test_the_workflow_may_read_and_nothing_else():
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"]
    assert "secrets." not in WORKFLOW
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
        for step in (step for step in job["steps"] if "uses" in step):
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            if step["uses"].startswith("actions/checkout"):
                assert step["with"] == {"persist-credentials": False}


def test_the_workflow_has_the_makefiles_torch_and_pythons_that_the_project_allows():
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert yaml.safe_load(WORKFLOW)["env"]["TORCH"].split()[0] == torch
    pythons = {tuple(map(int, row["python"].split("."))) for _, row in jobs(WORKFLOW)}
    assert f">={'.'.join(map(str, min(pythons)))}" == PROJECT["requires-python"]


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_what_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    assert set(re.findall(r"`make ([\w.-]+)", text)) <= TARGETS
    named = re.findall(r"\]\(((?!http)[^)#]+)", text)
    named += re.findall(r"`((?:\.?[\w-]+/)+[\w.]+|[A-Z]+\.md)`", text) if page in PAGES else []
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == PROJECT["version"]


def wheels_of_other_versions(text: str) -> set[str]:
    """The versions of zerokl that wheels and images in a text have, less the one of this project."""
    return set(re.findall(r"\bzerokl(?:_audit)?[-:](\d[\w.]*?)(?=-py3|\s|$)", text)) - {PROJECT["version"]}


def test_the_pages_name_the_wheels_of_this_version():
    pages = [path for kind in ("*.md", "*.yaml") for path in (ROOT / "docs").rglob(kind)]
    assert {path.name: named for path in pages if (named := wheels_of_other_versions(path.read_text()))} == {}


def test_control_another_version_is_found():
    text = "pip install zerokl_audit-0.0.9-py3-none-any.whl\nimage: registry.example/zerokl:0.0.8\n"
    assert wheels_of_other_versions(text) == {"0.0.9", "0.0.8"}


def test_the_proof_that_contributors_read_holds_and_so_does_its_control():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def loads_a_pickle(source: str) -> list[ast.Call]:
    """The calls in a module that load a pickle, or may."""
    if not MAY_LOAD.search(source):  # to read every module's syntax would take seconds
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func), call) for call in calls]
    return [c for name, c in named if LOADS_PICKLE.fullmatch(name) or (name.endswith(".recv") and not c.args)]


def test_the_places_that_load_a_pickle_are_those_that_the_page_names():
    pickles = (ROOT / "SECURITY.md").read_text().partition("## Pickle")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", pickles))
    by_file = {}
    for path in (p for floor in FLOORS for p in (ROOT / floor).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        by_file[file] = loads_a_pickle(path.read_text())
    assert {file for file, calls in by_file.items() if calls} == named
    for call in by_file["audit/frameworks/slime.py"]:
        assert "weights_only=True" in ast.unparse(call)


@pytest.mark.parametrize(
    "line",
    ["pickle.load(file)", "torch.load(path)", "dist.all_gather_object(a, b)", "connection.recv()", "Pool(2)"],
)
def test_control_a_call_that_loads_a_pickle_is_found(line):
    assert len(loads_a_pickle(line)) == 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist has no list of git's")
def test_the_package_has_every_file_of_git(tmp_path):
    """In a second what `make package` asks the wheel for in minutes."""
    built = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(built, cwd=ROOT, check=True, capture_output=True)
    package = tmp_path / "zerokl"
    files = {str(p.relative_to(package)): p.read_bytes() for p in package.rglob("*") if p.is_file()}
    check.compare(check.tracked(), files, "the package", whole=True)
