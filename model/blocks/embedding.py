"""What lies outside of layers: the embedding, the last norm, and lm_head, which may be tied to the embedding.

Shapes: T tokens of packed sequences, D hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch

from ...kernels.embedding import embedding
from ...kernels.passes import Pass
from ...kernels.rms_norm import add_rms_norm
from ..operation import STREAM, Equation, Operation, Site, Work, norm_row, projection_row
from ..sizes import Sizes
from .block import Rows, Weight


class Embedding:
    """The first operation of a decoder."""

    name = "embed"

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """embed [V, D]. Names in the checkpoint are whole here."""
        yield Weight(self.name, (c.hidden_size,), (("model.embed_tokens.weight", c.vocab_size),))

    def operations(self, c: Sizes) -> tuple[Operation, ...]:
        row = Operation(
            name=self.name,
            equation=Equation.EMBEDDING,
            reads=(),
            width=c.hidden_size,
            transformers=Site("model.embed_tokens"),
            vllm=Site("model.embed_tokens"),
            remedy="Compare the embedding in the engine's memory with the checkpoint's.",
        )
        return (row,)

    def forward(self, embed: torch.Tensor, ids: torch.Tensor, in_pass: Pass) -> torch.Tensor:
        """ids [T] -> the residual stream before the first layer, [T, D]."""
        return embedding(ids, embed, in_pass)


class Head:
    """The last operations of a decoder: a norm, and the logits of the drawn tokens."""

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """norm [D], and lm_head [V, D] where it is not the embedding."""
        yield Weight("norm", (), (("model.norm.weight", c.hidden_size),))
        if not c.tied:
            yield Weight("lm_head", (c.hidden_size,), (("lm_head.weight", c.vocab_size),))

    def operations(self, c: Sizes) -> tuple[Operation, ...]:
        logits = projection_row(
            "logits",
            "norm",
            c.hidden_size,
            c.vocab_size,
            "lm_head",
            "logits_processor",
            flops=Work(drawn=2 * c.hidden_size * c.vocab_size),
            remedy="Compare lm_head, the tying of the embeddings, and the dtype of the logits.",
        )
        logprob = Operation(
            name="logprob",
            equation=Equation.LOGPROB,
            reads=("logits",),
            width=1,
            transformers=None,  # the engines of an audit compute it from the logits
            vllm=None,
            remedy=(
                "Compare temperature, top-k, top-p and the kind of log-probability that the engine reports."
            ),
        )
        return norm_row("norm", STREAM, c.hidden_size, "model.norm"), logits, logprob

    def forward(self, norm: torch.Tensor, rows: Rows, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed stream that lm_head reads, and the stream, [T, D] each."""
        return add_rms_norm(rows.x, rows.residual, norm, eps, rows.context.in_pass)
