"""`zerokl audit --against REPORT`: which settings and figures have changed since an earlier audit.

An upgrade of an engine may choose another kernel without a word. The settings of both engines, the versions
and the machine have one fingerprint in every report; where two fingerprints differ, the settings that do are
listed.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.reading import read_json
from ..verify.difference import differences
from .figures.measure import Figures

_DTYPES = ("dtype", "head_dtype", "sampler_dtype", "sampler_head_dtype")
# How many times larger a KL must be to count as grown: k3 of a few hundred tokens varies by less.
_GROWN = 2.0


@dataclass(frozen=True)
class Change:
    """A setting that changed; "-" is none."""

    setting: str
    before: str
    now: str


@dataclass(frozen=True)
class ThenAndNow:
    """A figure of two audits; NaN where it was not finite."""

    before: float
    now: float


@dataclass(frozen=True)
class Since:
    """What differs between an audit and an earlier one."""

    audit: str  # the earlier one, as it was named
    changed: list[Change]
    figures: dict[str, ThenAndNow]
    grown: bool  # whether equal bits became unequal, or KL is more than twice as large


@dataclass(frozen=True)
class PastAudit:
    """What two audits are compared by: settings and figures by name. A figure that is not finite is NaN."""

    name: str
    settings: dict[str, str]
    figures: dict[str, float]


def settings_of(
    sides: Mapping[str, Any], versions: Mapping[str, str], engine_settings: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """The settings that a fingerprint is of, by name: engines, dtypes, versions, machine.

    sides: what a report calls sampler and trainer, and their dtypes.
    """
    values = {side: sides[side] for side in ("sampler", "trainer")}
    values |= {name.replace("_", " "): sides[name] for name in _DTYPES}
    values |= {f"version of {name}": v for name, v in versions.items()}
    for where, settings in engine_settings.items():
        values |= {f"{where}: {name}": value for name, value in settings.items()}
    return {name: str(value) for name, value in values.items()}


def fingerprint(settings: Mapping[str, str]) -> str:
    """SHA-256 over the settings, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_audit(name: str) -> PastAudit:
    """An earlier audit: its folder, or its audit.json. Raises ValueError for anything else."""
    path = Path(name) / "audit.json" if Path(name).is_dir() else Path(name)
    try:
        report = read_json(path)
        settings = settings_of(report, report["assumed"]["versions"], report["engine_settings"])
        figures = {x: report[x] for x in ("frac_equal", "max_abs")} | {"k3": report["k3"]["value"]}
        known = {x: math.nan if value is None else float(value) for x, value in figures.items()}
    except OSError as error:
        raise ValueError(f"audit: --against {path} cannot be read ({error.strerror})") from None
    except (AttributeError, KeyError, OverflowError, TypeError):
        raise ValueError(f"audit: --against {path} is no audit of two engines with their settings") from None
    except ValueError as error:
        raise ValueError(f"audit: --against {path} {error}") from None
    return PastAudit(name, settings, known)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """The settings that are others now, in their order."""
    return [Change(d.quantity, *d.values) for d in differences(before, now, absent="-")]


def changes_since(past: PastAudit, settings: Mapping[str, str], figures: Figures) -> Since:
    """What differs between an audit, by its settings and figures, and an earlier one."""
    now = {"frac_equal": figures.frac_equal, "max_abs": figures.max_abs, "k3": figures.k3.value}
    before = past.figures
    larger = now["k3"] > _GROWN * before["k3"] or (math.isnan(now["k3"]) and not math.isnan(before["k3"]))
    return Since(
        past.name,
        changes(past.settings, settings),
        {name: ThenAndNow(before[name], value) for name, value in now.items()},
        now["frac_equal"] < 1.0 and (before["frac_equal"] == 1.0 or larger),
    )
