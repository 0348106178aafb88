"""The parts of the pages about frameworks, from what each file of audit/frameworks declares."""

from collections.abc import Mapping
from functools import partial

from zerokl.audit.figures.bands import GATES
from zerokl.audit.formats.framework import BOTH, Framework, Log
from zerokl.audit.frameworks import FRAMEWORKS
from zerokl.pages.markdown import table

from ._markdown import prose

# What pages call the fields of a LoggedRollout, where the name says too little; "" stands in no table.
WORDS = {
    "completion_ids": "token ids",
    "mask": "drawn tokens",
    "logprobs": "sampler's column",
    "trainer_logprobs": "trainer's column",
    "sampling_params": "temperature, top-p, top-k",
    "sampling_mask": "ids that top-p kept",
    "weight_span": "version of the weights",
    "truncated": "cut by a limit",
    "decimals": "",
    "trainer_decimals": "",
}
# Fields that a table says are not there.
_MISSED = [
    *("trainer_logprobs", "sampling_params", "weight_span", "step"),
    *("prompt", "sample", "reward", "advantage"),
]


def frameworks() -> str:
    """Every way to a log with log-probabilities, those to both columns first. Then what has no page."""
    rows = []
    for framework in sorted(FRAMEWORKS.values(), key=lambda framework: framework.name == "zerokl"):
        ways = [(log.switch, log.columns) for log in framework.logs if log.columns]
        ways += [(framework.recording.switch, BOTH)] if framework.recording else []
        page = framework.page or f"#{framework.title.lower().replace(' ', '-')}"
        rows += [[framework.title, *way, f"[{framework.title}]({page})"] for way in ways]
    rows.sort(key=lambda row: row[2] != BOTH)
    sections = [_section(framework) for framework in FRAMEWORKS.values() if not framework.page]
    return "\n\n".join([table(["you use", "what to do", "the log has", "page"], rows), *sections])


def _section(framework: Framework) -> str:
    """The section of a framework that has no page."""
    parts = [_log(framework, log) for log in framework.logs]
    parts += [_recording(framework)] if framework.recording else []
    return "\n\n".join([f"## {framework.title}", *parts])


def gates() -> str:
    """The figure that each project gates on, and its bound."""
    rows = [
        [
            f"`{name}`",
            prose(f"`{gate.name}`: {gate.words}" if gate.name else gate.words),
            f"{'at most' if gate.may_reach else 'below'} {gate.bound:g}",
            prose(gate.source),
        ]
        for name, gate in GATES.items()
    ]
    return table(["`--band`", "the figure, and its name there", "bound", "where the bound is from"], rows)


def _log(framework: Framework, log: Log) -> str:
    return f"{_fields(log.fields, f'field of {log.file}')}\n\nThe form is known from {framework.source}."


def _recording(framework: Framework) -> str:
    fields = _fields(framework.recording.fields, "where it comes from")
    return f"{fields}\n\nThe form is known from {framework.source}."


def _fields(fields: Mapping[str, str], where: str) -> str:
    """A table of what a log tells of a completion, and of what it does not tell."""
    rows = [[_words(names.split()), text] for names, text in fields.items()]
    told = {name for names in fields for name in names.split()}
    if missed := [name for name in _MISSED if name not in told]:
        rows.append([_words(missed), "not there"])
    return table(["in the log", where], rows)


def _words(names: list[str]) -> str:
    return ", ".join(word for name in names if (word := WORDS.get(name, name)))


FRAMEWORK_PARTS = (
    {"frameworks": frameworks, "gates": gates}
    | {f"log-{log.name}": partial(_log, f, log) for f in FRAMEWORKS.values() for log in f.logs}
    | {f"recording-{f.name}": partial(_recording, f) for f in FRAMEWORKS.values() if f.recording}
)
