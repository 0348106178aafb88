"""What the sections of the configuration have in common: their base, and a kind of number."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

from ...kernels.sampling_params import SamplingParams

# A larger whole number is a mistake: no run has so many of anything, and int64 or fp64 would not hold it.
_LARGEST = 1 << 53
# fp32 holds no number outside of these: it would become infinite, or 0.
_SMALLEST_FLOAT, _LARGEST_FLOAT = 1e-37, 1e37


def _in_range(temperature: float) -> float:
    return SamplingParams(temperature).check().temperature


# 0, or a number by which logits can be divided.
Temperature = Annotated[float, AfterValidator(_in_range)]


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
