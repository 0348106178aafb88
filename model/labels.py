"""Token ids with labels, padded or packed, as a batch to score."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import torch

from .scoring import PackedBatch

UNLABELLED = -100


class LabelledSequence(NamedTuple):
    """The tokens of one sequence without padding, [n] each, on the CPU.

    labels: the padding's are left out. places: of each token in the flattened input.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    places: torch.Tensor


class LabelledBatch(NamedTuple):
    """Several sequences, and the tensor that they come from."""

    input_ids: torch.Tensor
    sequences: list[LabelledSequence]

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    ) -> Self:
        """input_ids, attention_mask, labels: [B, L]; or [T] without a mask, and cu_seqlens [S + 1].

        Raises ValueError for shapes that do not fit, and for a label on padding.
        """
        ids = input_ids.cpu()
        labels = torch.full_like(ids, UNLABELLED) if labels is None else labels.cpu()
        if labels.shape != ids.shape:
            raise ValueError(
                f"labels: shape {tuple(labels.shape)} must be that of input_ids {tuple(ids.shape)}"
            )
        flat_ids, flat_labels = ids.flatten(), labels.flatten()
        sequences = []
        for places in _places(ids, attention_mask, cu_seqlens):
            sequences.append(LabelledSequence(flat_ids[places], flat_labels[places], places))
        if sum(int((s.labels != UNLABELLED).sum()) for s in sequences) != int((labels != UNLABELLED).sum()):
            raise ValueError("labels: a label is on padding; set it to -100")
        return cls(input_ids, sequences)


def _places(
    ids: torch.Tensor, attention_mask: torch.Tensor | None, cu_seqlens: Sequence[int] | torch.Tensor | None
) -> list[torch.Tensor]:
    """The places of each sequence's tokens in the flattened ids."""
    if ids.dim() == 1:
        ends = torch.as_tensor([0, len(ids)] if cu_seqlens is None else cu_seqlens).tolist()
        if attention_mask is not None or ends[0] != 0 or ends[-1] != len(ids) or ends != sorted(ends):
            raise ValueError(
                f"cu_seqlens ({ends[:8]}) must rise from 0 to the {len(ids)} packed ids, which have no mask"
            )
        return [torch.arange(a, b) for a, b in pairwise(ends)]
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.cpu()
    if ids.dim() != 2 or mask.shape != ids.shape or cu_seqlens is not None:
        raise ValueError(
            f"input_ids {tuple(ids.shape)} must be [B, L] with an attention_mask of that shape, "
            "or [T] with cu_seqlens"
        )
    return [torch.nonzero(row.bool()).flatten() + b * ids.shape[1] for b, row in enumerate(mask)]


def pack_labels(batch: LabelledBatch) -> tuple[PackedBatch, torch.Tensor]:
    """The sequences up to the last token that is scored; those without one are left out.

    Returns also the place [C] of each scored token in the flattened input. Raises ValueError for a label on
    the first token of a sequence, which has nothing before it.
    """
    ids: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    start = 0  # the sequence's first row
    for s, sequence in enumerate(batch.sequences):
        scored = torch.nonzero(sequence.labels != UNLABELLED).flatten()
        if not len(scored):
            continue
        if scored[0] == 0:
            raise ValueError(
                f"labels: sequence {s} has a label on its first token, which has nothing before it"
            )
        ids.append(sequence.ids[: scored[-1]])
        rows.append(scored - 1 + start)
        start += len(ids[-1])
        targets.append(sequence.labels[scored])
        places.append(sequence.places[scored])
    lengths = tuple(map(len, ids)), tuple(map(len, targets))
    return PackedBatch(_joined(ids), _joined(rows), _joined(targets), *lengths), _joined(places)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)
