"""A report as JSON: dataclasses become objects, and what JSON does not have becomes null."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

# Metadata of a field. The object of JSON has no member for an optional one that is None. A part's own fields
# are members of the object around it.
OPTIONAL = {"optional": True}
PART = {"part": True}
OPTIONAL_PART = OPTIONAL | PART


def as_json(value: Any) -> Any:
    """A value for json.dumps. Infinities and NaN are null. "json" in a field's metadata is its name."""
    if is_dataclass(value):
        return value.as_json() if hasattr(value, "as_json") else _object(value)
    if isinstance(value, dict):
        return {name: as_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _object(value: Any) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for known in fields(value):
        member = getattr(value, known.name)
        if member is None and known.metadata.get("optional"):
            continue
        if known.metadata.get("part"):
            members |= as_json(member)
        else:
            members[known.metadata.get("json", known.name)] = as_json(member)
    return members
