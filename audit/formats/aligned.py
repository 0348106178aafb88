"""A sequence whose columns have an entry for each of its tokens, the prompt's included.

Shapes: T tokens of the sequence, C of the completion, which begins at the first token that was drawn.
"""

from typing import Any

import numpy as np

from . import fields
from .record import TokenIds


class Aligned:
    """A sequence, and its columns cut to the completion."""

    def __init__(self, ids_name: str, ids: TokenIds, mask_name: str, mask: Any, length: int = 0) -> None:
        """mask: [T], which tokens were drawn. length: tokens that are no padding; 0 is all.

        Raises ValueError where the mask does not fit, and where the first token was drawn: no prompt.
        """
        self._ids_name, self._count = ids_name, len(ids)
        self._start, self._end = 0, length or len(ids)
        drawn = fields.mask(mask_name, self.part(mask_name, mask, "0 and 1"), self._end)
        self._start = int(drawn.argmax()) if drawn.any() else self._end
        if self._start == 0:
            raise ValueError(f"{mask_name}: the first token was drawn, so there is no prompt")
        self.mask = drawn[self._start :]  # [C] bool
        self.prompt_ids = ids[: self._start]
        self.completion_ids = ids[self._start : self._end]  # empty where no token was drawn

    def part(self, name: str, values: Any, kind: str = "numbers") -> list:
        """The entries of a column, [T], that belong to the completion, [C]."""
        if len(fields.listed(name, values, kind)) != self._count:
            raise ValueError(f"{name} has {len(values)} entries for {self._count} {self._ids_name}")
        return values[self._start : self._end]

    def logprobs(self, name: str, values: Any) -> np.ndarray | None:
        """The logprobs of a column, [C] fp32; None where the log has no such column."""
        part = None if values is None else self.part(name, values)
        return fields.optional_logprobs(name, part, len(self.completion_ids), self.mask)

    def advantage(self, name: str, values: Any) -> float | tuple[float, ...] | None:
        """The advantages of a column, [C], or the one of the whole sequence."""
        values = self.part(name, values) if isinstance(values, list) else values
        return fields.advantage(name, values, len(self.completion_ids))
