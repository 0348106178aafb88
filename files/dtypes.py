"""The names of dtypes. It loads no torch, as an audit of a log's columns loads none."""

from typing import Any


def dtype_name(dtype: Any) -> str:
    """The name of a torch.dtype as configurations and vLLM write it, such as float32."""
    return str(dtype).removeprefix("torch.")
