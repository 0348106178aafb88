"""A setting is one field of a section. This file has what fields, sections and rules are made of.

Type, default and bounds of a setting are pydantic's. The text under it gives its meaning and unit. `setting`
takes what else is known of it (Facts). A function beside it says what it refuses (`rule`). Help, docs, the
ledger's head and the checks of a configuration read all of this from the fields.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import cleandoc, signature
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from ...files.inputs import read_text
from ...kernels.sampling_params import SamplingParams
from .sampler_names import EXTERNAL

# A larger whole number is a mistake: no run has so many of anything, and int64 or fp64 would not hold it.
_LARGEST = 1 << 53
# fp32 holds no number outside of these: it would become infinite, or 0.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1e-37, 1e37


def _in_range(temperature: float) -> float:
    return SamplingParams(temperature).check().temperature


# 0, or a number by which logits can be divided.
Temperature = Annotated[float, AfterValidator(_in_range)]


class Head(NamedTuple):
    """How the head of a run's ledger has a setting (runs/ledger_head.py). Without a word it is chained."""

    where_set: bool = False  # it is chained where it is not its default, as most runs do not have it
    why_not: str = ""  # why it is not chained
    # The configurations in which it decides no bit; a resumed run may change it there.
    is_free: Callable[[Any], bool] = lambda config: False
    kept: bool = False  # it is never chained, and a resumed run may not change it


ALWAYS, WHERE_SET = Head(), Head(where_set=True)


def free(why: str, when: Callable[[Any], bool] = lambda config: True) -> Head:
    """Of a setting that decides no bit. why: the reason. when: the configurations in which this is so."""
    return Head(why_not=why, is_free=when)


def kept(why: str) -> Head:
    """Of a setting that is not chained, and that a resumed run keeps all the same. why: the reason."""
    return Head(why_not=why, kept=True)


class Facts(NamedTuple):
    """What is known of a setting beside its field."""

    head: Head | None = None  # how the ledger's head has it; None: as its section says
    common: bool = False  # `zerokl train --help` shows it; others only `--help all` and `--help SECTION`
    also_called: str = ""  # its names in other frameworks, with spaces between them
    # How the keys begin that a file chose for this name. Another name on the command line takes their place;
    # with replaces_same the same name does so too.
    replaces: str = ""
    replaces_same: bool = False
    usual: Any = None  # of a `choice`: the default
    differs: bool = False  # where it is set the sampler differs from the trainer; that needs exact = false
    # Of a value, whether it needs whole weights; parallel.engine = "fsdp", parallel.tensor and
    # parallel.expert refuse it.
    needs_whole: Callable[[Any], bool] = lambda value: False
    only_with: str = ""  # the one advantage whose losses have this choice; another loss refuses it
    needs_experts: bool = False  # only a mixture of experts can have it


def setting(*default: Any, **words: Any) -> Any:
    """A field and what is known of its setting. words: of Facts, and of pydantic's Field."""
    facts = Facts(**{name: words.pop(name) for name in Facts._fields if name in words})
    assert words.keys() <= signature(Field).parameters.keys(), words
    return Field(*default, json_schema_extra={"facts": facts}, **words)


def choice(usual: Any, **words: Any) -> Any:
    """A setting that may be left open, and is then filled by a row of a table. usual: what most rows have."""
    return setting(None, usual=usual, **words)


class PlannedRun(NamedTuple):
    """A configuration and where it is to run. What is not known yet refuses nothing."""

    config: Any  # a Config, whose sections import this file
    device: str | None = None  # "cpu" or "cuda"; None: not known yet
    # The version of vLLM; it ends with "+cpu" for a build for CPUs. None: not known yet, or not installed.
    vllm: str | None = None
    ranks: int = 1

    @property
    def keyed_vllm(self) -> bool:
        """Whether vLLM draws with zerokl's keys, over the trainer's own weights."""
        return self.config.sampler in ("vllm-exact", "vllm-zerokl")

    @property
    def external(self) -> bool:
        """Whether an engine as it comes samples: hf or vllm."""
        return self.config.sampler in EXTERNAL

    def any_other(self, *dtypes: str) -> bool:
        """Whether one of these settings of precision, of the trainer or of the sampler, is not "compute"."""
        sides = self.config.precision, self.config.precision.of_sampler
        return any(getattr(side, name) != "compute" for side in sides for name in dtypes)


class rule(NamedTuple):  # noqa: N801 (it is used as a decorator)
    """A function in a section, beside its setting: (section, PlannedRun) -> why it is refused, or None."""

    refusal: Callable[[Any, Any], str | None]


@cache
def _texts(file: str) -> dict[tuple[str, str], str]:
    """The text under each field of a file's classes, by the names of class and field.

    pydantic's use_attribute_docstrings reads the same texts, and parses the file anew for each class: 0.05 of
    the 0.6 s in which a command starts.
    """
    texts = {}
    classes = (node for node in ast.walk(ast.parse(read_text(file))) if isinstance(node, ast.ClassDef))
    for node in classes:
        for field, below in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[node.name, field.target.id] = cleandoc(text)
    return texts


class Section(BaseModel):
    """A frozen model that takes no unknown keys, and no number that fp32 or int64 does not hold.

    The description of a field is the text under it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ignored_types=(rule,))
    # How the ledger's head has the settings of a section that do not say it: a word of the class.
    head: ClassVar[Head] = ALWAYS

    def __init_subclass__(cls, head: Head | None = None, **words: Any):
        super().__init_subclass__(**words)
        cls.head = head or cls.head

    @classmethod
    def __pydantic_init_subclass__(cls, **words: Any):
        super().__pydantic_init_subclass__(**words)
        file = getattr(sys.modules[cls.__module__], "__file__", None)
        texts = _texts(file) if file else {}
        for name, field in cls.model_fields.items():
            field.description = field.description or texts.get((cls.__name__, name))

    @field_validator("*")
    @classmethod
    def _holds(cls, value: Any) -> Any:
        if type(value) is int and abs(value) > _LARGEST:
            raise ValueError(f"must be at most {_LARGEST}")
        if type(value) is float and value and not _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT:
            raise ValueError(f"must be 0, or lie in {_SMALLEST_FLOAT:g} to {_LARGEST_FLOAT:g}")
        return value


class Setting(NamedTuple):
    """A setting: its dotted key, its field, and the section that it is in."""

    key: str
    field: FieldInfo
    section: type[Section]

    @property
    def facts(self) -> Facts:
        """What is known of it beside its field."""
        return (self.field.json_schema_extra or {}).get("facts", Facts())

    @property
    def head(self) -> Head:
        """How the ledger's head has it."""
        return self.facts.head or self.section.head

    @property
    def usual(self) -> Any:
        """Its default; of a choice that is left open what most rows have."""
        default = self.field.get_default(call_default_factory=True)
        return self.facts.usual if default is None else default

    def value(self, config: Section) -> Any:
        """Its value in a configuration."""
        return attrgetter(self.key)(config)

    def is_set(self, config: Section) -> bool:
        """Whether it is not its default."""
        return self.value(config) != self.usual


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field is; None for a setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _walk(model: type[Section], prefix: str = "") -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if section := section_of(field):
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, field, model)


@cache
def settings_of(model: type[Section]) -> dict[str, Setting]:
    """The settings of a configuration or a section by dotted key, in the order of their fields."""
    return {setting.key: setting for setting in _walk(model)}


def differing(section: Section) -> bool:
    """Whether a setting of a section is set by which the sampler differs from the trainer."""
    return any(s.facts.differs and s.is_set(section) for s in settings_of(type(section)).values())


def needing_whole(config: Section) -> list[str]:
    """The settings of a configuration that need whole weights on each rank, as `key (value)`."""
    settings = settings_of(type(config)).values()
    needing = [s for s in settings if s.facts.needs_whole(s.value(config))]
    needing += [s for s in settings if s.facts.differs and s.is_set(config)]
    return [f"{s.key} ({json.dumps(s.value(config))})" for s in needing]


def rules_of(section: type[Section]) -> list[rule]:
    """The rules beside the settings of a section, in the order of their lines."""
    values = [value for kind in reversed(section.__mro__) for value in vars(kind).values()]
    return [value for value in values if isinstance(value, rule)]
