"""What lies outside of layers: the embedding, the last norm, and lm_head, which may be tied to the embedding.

Shapes: T tokens of packed sequences, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.embedding import embedding
from ...kernels.leaves import WHOLE, Leaves
from ...kernels.passes import Pass
from ...kernels.rms_norm import add_rms_norm
from ...kernels.scale import scale
from ..config_file import ConfigFile
from ..operation import STREAM, Equation, Operation, Shown, Site, Work, norm_row, projection_row
from ..sizes import Sizes
from .block import Rows, Weight


@dataclass(frozen=True)
class Embedding:
    """The first operation of a decoder.

    factor: what a row is multiplied by. rounded: whether the factor is rounded to the compute dtype first.
    """

    factor: float = 1.0
    rounded: bool = False

    name = "embed"

    @property
    def values(self) -> dict[str, Any]:
        """Its variants by name, as JSON holds them."""
        return {} if self.factor == 1.0 else {"embedding_multiplier": self.factor}

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """embed [V, D]. Names in the checkpoint are whole here."""
        rows = c.vocab_size // c.ranks
        yield Weight(self.name, (c.hidden_size,), (("model.embed_tokens.weight", rows),), shared_rows=(rows,))

    def operations(self, c: Sizes) -> tuple[Operation, ...]:
        transformers = vllm = Site("model.embed_tokens")
        if self.factor != 1.0:  # the weight's module shows the rows before they are multiplied
            transformers, vllm = Site("model.layers.0.input_layernorm", Shown.INPUT), None
        row = Operation(
            name=self.name,
            equation=Equation.EMBEDDING,
            reads=(),
            width=c.hidden_size,
            factor=self.factor,
            transformers=transformers,
            vllm=vllm,
            remedy="Compare the embedding in the engine's memory with the checkpoint's.",
        )
        return (row,)

    def forward(
        self, embed: torch.Tensor, ids: torch.Tensor, in_pass: Pass, leaves: Leaves = WHOLE
    ) -> torch.Tensor:
        """ids [T] -> the residual stream before the first layer, [T, D]. leaves: of ranks that share it."""
        x = embedding(ids, embed, in_pass, leaves)
        if self.factor == 1.0:
            return x
        return scale(x, torch.tensor(self.factor, dtype=x.dtype).item() if self.rounded else self.factor)


def root_scaled(config: ConfigFile) -> Embedding:
    """The embedding of a Gemma: times sqrt(hidden size), which transformers rounds to the compute dtype."""
    return Embedding(config.fields.hidden_size**0.5, rounded=True)


@dataclass(frozen=True)
class Head:
    """The last operations of a decoder: a norm, and the logits of the drawn tokens.

    divisor: what logits are divided by. The rows that lm_head reads are divided in their place.
    cap: of the logits (kernels/softcap.py); 0.0 is none.
    """

    divisor: float = 1.0
    cap: float = 0.0

    @property
    def values(self) -> dict[str, Any]:
        """Its variants by name, as JSON holds them."""
        divisor = {} if self.divisor == 1.0 else {"logits_scaling": self.divisor}
        return divisor | ({"final_logit_softcapping": self.cap} if self.cap else {})

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """norm [D], and lm_head [V, D] where it is not the embedding."""
        yield Weight("norm", (), (("model.norm.weight", c.hidden_size),))
        if not c.tied:
            rows = c.vocab_size // c.ranks
            yield Weight("lm_head", (c.hidden_size,), (("lm_head.weight", rows),), shared_rows=(rows,))

    def operations(self, c: Sizes) -> tuple[Operation, ...]:
        logits = projection_row(
            "logits",
            "norm",
            c.hidden_size,
            c.vocab_size,
            "lm_head",
            "logits_processor",
            flops=Work(drawn=2 * c.hidden_size * c.vocab_size),
            factor=1.0 / self.divisor,
            remedy="Compare lm_head, the tying of the embeddings, and the dtype of the logits.",
            cap=self.cap,
            # The module shows the logits before they are divided or capped.
            **({} if self.divisor == 1.0 and not self.cap else {"transformers": None}),
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

    def forward(self, norm: torch.Tensor, rows: Rows, c: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed stream, and the stream, [T, D] each."""
        return add_rms_norm(rows.x, rows.residual, norm, c.eps, rows.context.in_pass, c.norm_plus_one)

    def read_by_lm_head(self, normed: torch.Tensor) -> torch.Tensor:
        """The rows of which lm_head makes the logits, [T, D]."""
        return normed if self.divisor == 1.0 else scale(normed, 1.0 / self.divisor)
