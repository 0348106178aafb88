"""Lines about installing work as they stand, from a checkout or a wheel: no package index has zerokl."""

import re
import tomllib
from pathlib import Path

import pytest
from zerokl.engine.runs import trackers
from zerokl.verify.run_environment import PACKAGE_ROOT as ROOT

from tests.test_floors import FLOORS

FOLDERS = ("benchmarks", "docs", "wheels", *FLOORS)
KINDS = (".py", ".md", ".sh", ".yaml", ".toml", ".sbatch", ".ipynb")
# zerokl or zerokl-audit as pip would look for it in an index, and an address that nobody has.
_IN_NO_INDEX = re.compile(
    r"pip install(?: -\S+)* [\"']?zerokl(?:-audit)?(?=[\"'\s`;,.)]|$)|\bzerokl(?:-audit)?(?:\[[a-z{]| @ )"
    r"|\bHOST/OWNER\b|\bOWNER/zerokl\b"
)
_EXTRAS = re.compile(r"[\"'](\./wheels/audit|\.|dist/zerokl-\S+?\.whl)\[([\w,]+)\][\"']")


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


EXTRAS = project(ROOT)["optional-dependencies"]
EXTRAS_OF_THE_AUDIT = project(ROOT / "wheels" / "audit")["optional-dependencies"]


def texts() -> list[Path]:
    """What users read or are told: pages, messages, and the files of the root that others read."""
    root = [
        path for path in ROOT.iterdir() if path.suffix in (*KINDS, ".yml") and path.name != "CHANGELOG.md"
    ]
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in KINDS]
    return [path for path in [*root, *inside] if path.is_file()]


def test_nothing_tells_to_install_what_no_index_has():
    matches = {str(p.relative_to(ROOT)): m[0] for p in texts() if (m := _IN_NO_INDEX.search(p.read_text()))}
    assert matches == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install zerokl",
        "`pip install zerokl-audit`, then",
        "pip install --force-reinstall --no-deps zerokl",
        'python -m pip install "zerokl[record]"',
        'f"pip install zerokl[{name}]"',
        "in `zerokl-audit[model]` only",
        '"zerokl @ git+https://HOST/OWNER/zerokl"',
        "- uses: OWNER/zerokl@REF",
    ],
)
def test_control_a_name_that_no_index_has_is_found(line):
    assert _IN_NO_INDEX.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "python -m pip install .",
        'python -m pip install ".[record]"',
        "python -m pip install dist/zerokl-0.2.0-py3-none-any.whl",
        "python -m pip install ./wheels/audit",
        "pip uninstall zerokl-audit",
    ],
)
def test_a_checkout_and_a_wheel_are_no_names_of_an_index(line):
    assert not _IN_NO_INDEX.search(line)


def test_the_extras_of_every_line_exist():
    named = {match for path in texts() for match in _EXTRAS.findall(path.read_text())}
    assert {(".", "ray"), ("./wheels/audit", "record")} <= named
    for target, extras in named:
        assert set(extras.split(",")) <= set(EXTRAS_OF_THE_AUDIT if "audit" in target else EXTRAS), target


def quoted(extra: str) -> str:
    """What pip installs for an extra, as a shell has it."""
    return " ".join(f"'{requirement}'" for requirement in EXTRAS[extra])


def test_the_message_of_a_tracker_names_what_its_extra_brings():
    core = {f"'{requirement}'" for requirement in project(ROOT)["dependencies"]}
    for tracker, line in trackers._REQUIREMENTS.items():
        assert line == quoted(tracker) if tracker in EXTRAS else line in core


@pytest.mark.parametrize(
    ("extra", "file"),
    [
        ("ray", "engine/rollout/pool/on_ray.py"),
        ("textarena", "integrations/environments/textarena.py"),
        ("verifiers", "integrations/environments/verifiers.py"),
    ],
)
def test_a_message_names_what_the_extra_brings(extra, file):
    assert f"pip install {quoted(extra)}" in (ROOT / file).read_text().replace("\\'", "'")


def test_the_message_of_gym_names_the_version_of_gem():
    (gem,) = EXTRAS["gem"]
    assert f'"gem": "{gem.partition(";")[0]}"' in (ROOT / "integrations/environments/gym.py").read_text()


def test_the_readme_counts_its_recipes():
    word, recipes = re.search(
        r"^## (\w+) recipes\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S
    ).groups()
    words = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    assert words.index(word) + 1 == len(re.findall(r"^\*\*", recipes, re.M))
