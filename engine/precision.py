"""Precision settings:

which dtype computes what, in the sampler and in the trainer, and how the loss is scaled.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class PrecisionConfig(BaseModel):
    """Dtypes beside the compute dtype, and loss scaling.

    The sampler has the trainer's, unless a sampler_ key says otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    scaling: Literal["auto", "off", "static", "dynamic"] = "auto"
    """Loss scaling. auto is dynamic for float16 and off for the others, whose exponents need none."""
    scale: float = 65536.0
    """The scale at the start; a power of two."""
    growth_interval: int = Field(100, ge=1)
    """Updates without overflow after which a dynamic scale is doubled."""
    backoff: float = Field(0.5, gt=0, lt=1)
    """A dynamic scale is multiplied by this at an overflow; a power of two."""
    minimum: float = 1.0
    """A dynamic scale falls no lower; a power of two."""
    maximum: float = 16777216.0
    """A dynamic scale rises no higher; a power of two."""
    head_dtype: Literal["compute", "float32"] = "compute"
    """Dtype of the logits: the compute dtype, or float32. With float32 hidden states and head are multiplied
    in fp32, and the logits are not rounded.
    """
    cache_dtype: Literal["compute", "bfloat16", "float16"] = "compute"
    """Dtype to which keys and values are rounded before attention reads them, in the sampler's cache and in
    the trainer alike. Where it is narrower than the compute dtype, the sampler's cache stores them in it:
    half the bytes with float32.
    """
    tiles: Literal["vllm-0.32", "vllm-0.33"] = "vllm-0.32"
    """The vLLM version whose tiles along the reduced dimension the matrix products have on a GPU, where tiles
    order sums. With sampler = "vllm-stock" and exact = true it must be the version that samples.
    """
    sampler_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Compute dtype of the sampler, where it is another. Only with exact = false."""
    sampler_head_dtype: Literal["", "compute", "float32"] = ""
    """head_dtype of the sampler, where it is another. Only with exact = false."""
    sampler_cache_dtype: Literal["", "compute", "bfloat16", "float16"] = ""
    """cache_dtype of the sampler, where it is another. Only with exact = false."""

    @field_validator("scale", "backoff", "minimum", "maximum")
    @classmethod
    def _power_of_two(cls, value: float) -> float:
        if value <= 0 or math.frexp(value)[0] != 0.5:
            raise ValueError(f"{value} must be a power of two, so that no bit of a weight depends on it")
        return value

    @property
    def sampler_differs(self) -> bool:
        """Whether the sampler was asked to compute in another way."""
        return bool(self.sampler_dtype or self.sampler_head_dtype or self.sampler_cache_dtype)

    @property
    def of_sampler(self) -> "PrecisionConfig":
        """The same with head_dtype and cache_dtype of the sampler in the trainer's place."""
        return self.model_copy(
            update={
                "head_dtype": self.sampler_head_dtype or self.head_dtype,
                "cache_dtype": self.sampler_cache_dtype or self.cache_dtype,
            }
        )
