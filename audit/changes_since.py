"""`zerokl audit --against REPORT`: which settings and figures have changed since an earlier audit.

An upgrade of an engine may choose another kernel without a word. The settings of both engines, the versions
and the machine have one fingerprint in every report; where two fingerprints differ, the settings that do are
listed.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..verify.reading import read_json

Report = Mapping[str, Any]

_DTYPES = ("dtype", "head_dtype", "sampler_dtype", "sampler_head_dtype")
# How many times larger a KL must be to count as grown: k3 of a few hundred tokens varies by less.
_GROWN = 2.0


def settings_of(report: Report) -> dict[str, str]:
    """The settings that a fingerprint is of, by name: engines, machine, versions, dtypes."""
    sides = {side: report[side] for side in ("sampler", "trainer")}
    values = sides | {name.replace("_", " "): report[name] for name in _DTYPES}
    values |= {f"version of {name}": v for name, v in report["assumed"]["versions"].items()}
    for where, settings in report["engine_settings"].items():
        values |= {f"{where}: {name}": value for name, value in settings.items()}
    return {name: str(value) for name, value in values.items()}


def fingerprint(report: Report) -> str:
    """SHA-256 over the settings, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings_of(report), sort_keys=True).encode()).hexdigest()


def read_audit(name: str) -> Report:
    """The report of an audit: its folder, or its audit.json. Raises ValueError for anything else."""
    path = Path(name) / "audit.json" if Path(name).is_dir() else Path(name)
    try:
        report = read_json(path)
        settings_of(report)
        figures(report)
    except OSError as error:
        raise ValueError(f"audit: --against {path} cannot be read ({error.strerror})") from None
    except (AttributeError, KeyError, OverflowError, TypeError):
        raise ValueError(f"audit: --against {path} is no audit of two engines with their settings") from None
    except ValueError as error:
        raise ValueError(f"audit: --against {path} {error}") from None
    return report


def figures(report: Report) -> dict[str, float]:
    """The figures that two audits are compared by. A figure that is not finite is NaN."""
    values = {name: report[name] for name in ("frac_equal", "max_abs")} | {"k3": report["k3"]["value"]}
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def compare_audits(report: Report, earlier: Report, name: str) -> dict[str, Any]:
    """What differs between a report and an earlier one.

    Returns "audit" (the earlier one's name), "changed" (setting, before, now), and "figures" (before and now
    of each), and "grown": whether equal bits became unequal, or KL is more than twice as large.
    """
    before, now = settings_of(earlier), settings_of(report)
    changed = [
        {"setting": key, "before": before.get(key, "-"), "now": now.get(key, "-")}
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    ]
    old, new = figures(earlier), figures(report)
    larger = new["k3"] > _GROWN * old["k3"] or (math.isnan(new["k3"]) and not math.isnan(old["k3"]))
    return {
        "audit": name,
        "changed": changed,
        "figures": {key: {"before": old[key], "now": new[key]} for key in new},
        "grown": new["frac_equal"] < 1.0 and (old["frac_equal"] == 1.0 or larger),
    }
