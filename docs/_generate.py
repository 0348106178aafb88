"""Parts of pages that are made from the code, from committed results and from other files.

A page has each between two marks, so that whoever reads the file sees it:

<!-- generated: NAME -->         what PARTS has under that name
<!-- generated: file PATH -->    a file of the repository: a page as it is, any other one as a block of code
<!-- end -->

`make docs-tables` writes all of them anew (python -m zerokl.docs._generate), and tests/docs/test_markdown.py
fails where one is not what would be written.
"""

import ast
import inspect
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import annotated_types
from zerokl.audit import config as audit_config
from zerokl.audit.faults import all_faults
from zerokl.engine.config.compatibility import rules as asked_rules
from zerokl.engine.config.loss_section import PRESETS
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.sampler_names import EXTERNAL, SAMPLERS
from zerokl.engine.config.section import Setting, rule, settings_of
from zerokl.engine.rollout.vllm.arguments import ALLOWED, SET_BY_ZEROKL
from zerokl.model.families import MODEL_TYPES
from zerokl.model.families import __name__ as families_package
from zerokl.pages.markdown import table
from zerokl.verify.ledger import FORMAT

from ._api import imported_names, public_names
from ._commands import commands
from ._definitions import ROOT
from ._frameworks import FRAMEWORK_PARTS
from ._markdown import PART, prose
from ._mesh import predicted, refused
from ._refusals import refusals
from ._results import RESULTS
from ._wire import wire

_LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".diff": "diff",
    ".jsonl": "json",
    ".yaml": "yaml",
    ".sbatch": "bash",
}


def main() -> None:
    """Write the parts of every page anew. It names the pages that change."""
    for page in pages():
        text = filled(page)
        if text != page.read_text():
            page.write_text(text)
            print(page.relative_to(ROOT))


def pages() -> list[Path]:
    """README, and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: Path) -> str:
    """The text of a page with its parts as they have to be. KeyError for a name that is none."""

    def part(mark: re.Match) -> str:
        name = mark[2]
        text = shown(ROOT / name, page) if mark[1].startswith("<!-- generated: file ") else PARTS[name]()
        return f"{mark[1]}\n{text.strip()}\n\n<!-- end -->"

    return PART.sub(part, page.read_text())


def shown(file: Path, page: Path) -> str:
    """A file as a part of a page: a block of code under its name, or a page's text with links from there."""
    if file.suffix != ".md":
        name = f"[`{file.relative_to(ROOT).as_posix()}`]({os.path.relpath(file, page.parent)})"
        return f"{name}:\n\n```{_LANGUAGES[file.suffix]}\n{file.read_text().rstrip()}\n```"

    def link(target: re.Match) -> str:
        return f"]({os.path.relpath(file.parent / target[1], page.parent)}"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)", link, file.read_text())


# The configuration


def configuration() -> str:
    """Every key, section by section, each with a heading that other pages link to."""
    parts, section = ["## A run", ""], ""
    for key, setting in settings_of(Config).items():
        if (name := key.rpartition(".")[0]) != section:
            section = name
            parts += [f"## [{name}]", "", prose(setting.section.__doc__ or ""), ""]
        parts += _key(setting)
    return "\n".join(parts)


def _key(setting: Setting) -> list[str]:
    default = setting.field.get_default(call_default_factory=True)
    is_open = setting.facts.usual is not None
    shown = "the preset's" if is_open else "not there" if default is None else f"`{_toml(default)}`"
    facts = f"{_type(setting.field)}; default: {shown}"
    return [f"### `{setting.key}`", "", prose(setting.field.description or ""), "", facts, ""]


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{}" if not value else json.dumps(value)
    return json.dumps(value)


def _type(field) -> str:
    """A field's type and bounds, in words with a capital."""
    annotation = field.annotation
    if types.NoneType in typing.get_args(annotation):  # X | None: None is not written
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    bounds = [_bound(m) for m in field.metadata if _bound(m)]
    words = ", ".join([_type_name(annotation), *bounds])
    return words[0].upper() + words[1:]


def _type_name(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f"`{json.dumps(v)}`" for v in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        return f"list of {_type_name(item).removeprefix('one of ')}{'s' if item in (str, int, float) else ''}"
    if typing.get_origin(annotation) is dict or annotation is dict:
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}
    return names[annotation]


def _bound(rule: object) -> str:
    words = {
        annotated_types.Ge: "at least",
        annotated_types.Gt: "above",
        annotated_types.Le: "at most",
        annotated_types.Lt: "below",
    }
    for kind, word in words.items():
        if isinstance(rule, kind):
            return f"{word} {getattr(rule, kind.__name__.lower())}"
    return f"a multiple of {rule.multiple_of}" if isinstance(rule, annotated_types.MultipleOf) else ""


def loss_presets() -> str:
    """The loss table: a row for each preset, a column for each choice that differs between them."""
    head = [
        "preset",
        "advantage",
        "importance_sampling_level",
        "bound",
        "correction",
        "loss_agg_mode",
        "more",
    ]
    in_bounds = ["clip_low", "clip_high", "correction_level", "correction_low", "correction_high"]
    more = [name for name in PRESETS["pg"] if name not in {*head, "k", *in_bounds}]
    rows = []
    for name, row in PRESETS.items():
        low, high = row["clip_low"], row["clip_high"]
        bound = row["bound"] if row["bound"] == "none" else f"{row['bound']}, {1 - low:g} to {1 + high:g}"
        correction = row["correction"]
        if correction in ("truncate", "mask"):
            outside = f"outside {row['correction_low']:g} to" if row["correction_low"] else "above"
            correction = f"{correction} {outside} {row['correction_high']:g}, by {row['correction_level']}"
        extra = ", ".join(f"{k} {row[k]:g}" for k in more if row[k] != PRESETS["pg"][k])
        rows.append(
            [
                f"`{name}`",
                f"pass_at_k, k {row['k']}" if row["advantage"] == "pass_at_k" else row["advantage"],
                row["importance_sampling_level"],
                bound,
                correction,
                row["loss_agg_mode"],
                extra,
            ]
        )
    return table(head, rows)


def rules() -> str:
    """What the rules of all sections say in the order of asking, and when."""
    rows = [row for section, asked in asked_rules(Config) for row in _refusals(section, asked)]
    return table(["what is said (… is a value)", "refused when"], rows)


def _refusals(section: str, asked: rule) -> Iterator[list[str]]:
    """What each `if` of a rule says, and when, with the names before it written out."""
    written_out = _WrittenOut({})
    for line in ast.parse(textwrap.dedent(inspect.getsource(asked.refusal))).body[0].body:
        if isinstance(line, ast.Assign):
            written_out.values[line.targets[0].id] = written_out.visit(line.value)
            continue
        condition = ast.unparse(written_out.visit(line.test)).replace("|", "\\|")
        condition = re.sub(r"\brun\.(config\.)?", "", condition)
        condition = re.sub(r"\bself\.", f"{section}." if section else "", condition)
        condition = re.sub(r"\bself\b", section or "config", condition)
        yield [prose(_message(line.body[-1].value)), f"`{condition}`"]


class _WrittenOut(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _message(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)


def free_keys() -> str:
    """The keys and sections that decide no bit, and why."""
    free = {}
    for key, setting in settings_of(Config).items():
        if setting.head.why_not and not setting.head.kept:
            free[key if setting.facts.head else key.partition(".")[0]] = setting.head.why_not
    return table(
        ["key or section", "why it decides no bit"], [[f"`{key}`", prose(why)] for key, why in free.items()]
    )


def ledger_format() -> str:
    """The number of the ledger's format."""
    return (
        f"The format of the file is number {FORMAT}. A ledger of another format is refused: "
        "use the version that wrote it."
    )


def predicted_faults() -> str:
    """The faults that a log is tried on: what is tried, whether a model is needed, and a report of each."""
    without = all_faults.without_model()
    rows = [
        [
            fault.name,
            prose(fault.tries),
            "" if fault in without else "yes",
            ", ".join(f"[`{key}`](../configuration.md#perturb{key})" for key in fault.perturb),
            ", ".join(fault.known_from),
        ]
        for fault in all_faults.with_model()
    ]
    return table(["fault", "what is tried", "needs a model", "`[perturb]` plants it", "reported"], rows)


def shown_faults() -> str:
    """The faults that ids and draws show."""
    shown = [*all_faults.in_ids(), *all_faults.in_draws()]
    tries: dict[str, list[str]] = {}
    for fault in shown:
        needs = "; needs a model" if fault in all_faults.in_draws() else ""
        tries.setdefault(fault.name, []).append(fault.tries + needs)
    reported = {fault.name: ", ".join(fault.known_from) for fault in shown if fault.known_from}
    rows = [[name, prose("; or ".join(words)), reported.get(name, "")] for name, words in tries.items()]
    return table(["fault", "what shows it", "reported"], rows)


def checked_faults() -> str:
    """The faults that checks of a whole log tell."""
    names = {fault: fault.name.replace("{", "*").replace("}", "*") for fault in all_faults.checked()}
    rows = [[name, prose(fault.tries)] for fault, name in names.items()]
    return table(["fault", "what shows it"], rows)


def log_fields() -> str:
    """The fields of a log, from its JSON schema."""
    schema = json.loads((ROOT / "audit/formats/log.schema.json").read_text())
    return table(
        ["field", "meaning"],
        [[f"`{name}`", field["description"]] for name, field in schema["properties"].items()],
    )


def places() -> str:
    """Floors and rooms from the top, as tests/test_floors.py has them, with the first sentence of each."""
    tree = ast.parse((ROOT / "tests/test_floors.py").read_text())
    named = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "PLACES")
    rows = []
    for place in ast.literal_eval(named):
        path = place.replace(".", "/")
        path += "" if (ROOT / path).is_dir() else ".py"
        file = ROOT / path if path.endswith(".py") else ROOT / path / "__init__.py"
        docstring = " ".join(ast.get_docstring(ast.parse(file.read_text())).split())
        rows.append([f"[`{path}`](../{path})", prose(re.split(r"(?<=\.) ", docstring)[0])])
    return table(["place", "what lives there"], rows)


def samplers() -> str:
    """Every sampler: which engine it is, and which command takes it."""
    rows = []
    for name, line in (SAMPLERS | audit_config.SAMPLERS).items():
        train = "no" if name not in SAMPLERS else "with `exact = false`" if name in EXTERNAL else "yes"
        rows.append([f"`{name}`", prose(line), train, "yes" if name in audit_config.SAMPLERS else "no"])
    return table(["sampler", "engine", "`zerokl train`", "`zerokl audit`"], rows)


def audit_samplers() -> str:
    """The engines that draw in an audit."""
    rows = [[f"`{name}`", prose(line)] for name, line in audit_config.SAMPLERS.items()]
    rows.append(["a file", "nothing: [a log](log.md) of rollouts that were drawn elsewhere"])
    return table(["`--sampler`", "draws with"], rows)


def audit_trainers() -> str:
    """The engines that score in an audit."""
    rows = [[f"`{name}`", prose(line)] for name, line in audit_config.TRAINERS.items()]
    return table(["`--trainer`", "scores with"], rows)


def families() -> str:
    """The families of models, each with the first line of its file."""
    rows = []
    for name, family in sorted(MODEL_TYPES.items()):
        words = inspect.getdoc(sys.modules[f"{families_package}.{name}"]).splitlines()[0]
        rows.append([f"`{family.architecture}`", f"`{name}`", prose(words)])
    return table(["architecture", "preset of `zerokl init`", "what it is"], rows)


def vllm_allowed() -> str:
    """The allowed arguments of vLLM's engine, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in ALLOWED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return table(
        ["why it is allowed", "arguments"],
        [[prose(reason), ", ".join(names)] for reason, names in by_reason.items()],
    )


def vllm_set() -> str:
    """The arguments that a setting of zerokl stands for."""
    return table(
        ["argument of vLLM", "set instead"],
        [[f"`{a}`", f"[`{b}`](configuration.md#{b.replace('.', '')})"] for a, b in SET_BY_ZEROKL.items()],
    )


PARTS = (
    RESULTS
    | FRAMEWORK_PARTS
    | {
        "configuration": configuration,
        "loss-presets": loss_presets,
        "rules": rules,
        "free-keys": free_keys,
        "ledger-format": ledger_format,
        "places": places,
        "log-fields": log_fields,
        "predicted-faults": predicted_faults,
        "shown-faults": shown_faults,
        "checked-faults": checked_faults,
        "samplers": samplers,
        "audit-samplers": audit_samplers,
        "audit-trainers": audit_trainers,
        "families": families,
        "refusals": refusals,
        "vllm-allowed": vllm_allowed,
        "vllm-set": vllm_set,
        "public-names": public_names,
        "imported-names": imported_names,
        "commands": commands,
        "wire": wire,
        "mesh": refused,
        "mesh-times": predicted,
    }
)

if __name__ == "__main__":
    main()
