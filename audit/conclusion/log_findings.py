"""What the hypotheses about a log say, in words."""

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]

# Times the size of rounding up to which a difference may be rounding alone.
BEYOND = 3.0


def finding(kind: str, text: str, remedy: str) -> dict[str, str]:
    """A likely cause: its kind, the cause in words, and what to do about it."""
    return {"kind": kind, "text": text, "remedy": remedy}


def log_notes(report: Report) -> list[str]:
    """Faults that a log's ids show by themselves."""
    found = report.get("log_findings", [])
    texts = [f"In the log, {x['name']}: {x['text']} {x['remedy']}" for x in found]
    return texts + ([_trainer_column(report["trainer_column"])] if "trainer_column" in report else [])


def _trainer_column(tried: Report) -> str:
    """What the model and the sampler's column say to the log's own trainer column."""
    distance = f"The log's trainer column differs from the model by {tried['distance']:.3g} nats a token"
    beside = tried["distribution"]["found"]
    if beside and beside["kind"].startswith("trainer"):
        return f"{distance}: {beside['text']} {beside['remedy']}"
    if tried["distance"] <= BEYOND * tried["rounding"]:
        return "The log's trainer column is the model's, to within rounding."
    if found := tried["found"]:
        return f"{distance}, and {found['name']} fits it: {found['what']}. {found['remedy']}"
    return f"{distance}, and no hypothesis fits it."


def trainer_column_fault(report: Report) -> dict[str, str] | None:
    """A named error of the log's own trainer column, where the log was audited with a model."""
    tried = report.get("trainer_column")
    if not tried:
        return None
    beside = tried["distribution"]["found"]
    if beside and beside["kind"].startswith("trainer"):
        return finding(beside["kind"], _trainer_column(tried), beside["remedy"])
    if tried["found"] and tried["distance"] > BEYOND * tried["rounding"]:
        name = f"the log's trainer column, {tried['found']['name']}"
        return finding(name, _trainer_column(tried), tried["found"]["remedy"])
    return None


def fitting(report: Report) -> dict[str, str] | None:
    """What was tried on a log and explains its numbers."""
    found = report.get("hypotheses", {}).get("found")
    if not found:
        return None
    of_lines = f" in {found['lines']} of {found['lines_tried']} lines" if found["lines_tried"] > 1 else ""
    also = report["hypotheses"]["also"]
    other = f" As near: {'; '.join(also[:2])}." if also else ""
    return finding(
        found["name"],
        f"{found['name']}: {found['what']}. It explains {found['explained']:.3g} of the "
        f"{found['distance']:.3g} nats by which a token differs{of_lines}.{other}",
        found["remedy"],
    )


def _rounding_of(report: Report) -> str:
    """The dtype whose rounding a difference is compared with: without a model, that of an fp32 forward."""
    return "an fp32 forward" if report["dtype"] not in ("float32", "bfloat16", "float16") else report["dtype"]


def none_fits(report: Report) -> dict[str, str] | None:
    """A log that no hypothesis explains: rounding, or something that is not in the table."""
    tried = report.get("hypotheses")
    if not tried or not tried["tried"]:
        return None
    if tried["distance"] <= BEYOND * tried["rounding"]:
        return finding(
            "rounding",
            f"rounding alone. None of {tried['tried']} hypotheses fits, and the difference of "
            f"{tried['distance']:.2g} nats a token is of the size that {_rounding_of(report)} rounds "
            f"({tried['rounding']:.2g}).",
            "Nothing is broken. Another dtype makes it smaller; importance sampling corrects for it.",
        )
    if not tried["rows"]:
        return None
    nearest, explained = tried["rows"][0], 1 - tried["rows"][0]["share_left"]
    text = f"none of {tried['tried']} hypotheses fits"
    if explained >= 0.1:
        text += f". The nearest is {nearest['name']} ({nearest['what']}); it would explain {explained:.0%}"
        text += " of the difference."
    else:
        text += ", and none explains a tenth of the difference."
    if tried["need_a_model"]:
        remedy = f"Name the model with --model: {tried['need_a_model']} further hypotheses need it."
    else:
        remedy = (
            "Audit the log with the checkpoint that drew it (--weight_version, --checkpoints), or let the "
            "engine draw here (--sampler vllm, --sampler hf): then every operation is compared."
        )
    return finding("unknown", text, remedy)
