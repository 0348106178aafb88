"""The base of the sections of the configuration: what holds for every field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

# A larger whole number is a mistake: no run has so many of anything, and int64 or fp64 would not hold it.
_LARGEST = 1 << 53
# fp32 holds no number outside of these: it would become infinite, or 0.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1e-37, 1e37


class Section(BaseModel):
    """A frozen model that takes no unknown keys, and no number that fp32 or int64 does not hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _holds(cls, value: Any) -> Any:
        if type(value) is int and abs(value) > _LARGEST:
            raise ValueError(f"must be at most {_LARGEST}")
        if type(value) is float and value and not _SMALLEST_FLOAT <= abs(value) <= _LARGEST_FLOAT:
            raise ValueError(f"must be 0, or lie in {_SMALLEST_FLOAT:g} to {_LARGEST_FLOAT:g}")
        return value
