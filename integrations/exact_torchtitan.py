"""zerokl's model inside torchtitan (0.3.0): its module, its sharding, and the loss of its log-probabilities.

    # my_run.py
    from zerokl.integrations.exact_torchtitan import ExactLoss, ExactTrainer, exact_spec

    def config() -> ExactTrainer.Config:
        return ExactTrainer.Config(model_spec=exact_spec("Qwen/Qwen3-0.6B"), loss=ExactLoss.Config(), ...)

    torchrun --nproc-per-node 2 -m torchtitan.train --module my_run --config config

The loss is the sum of the kernels' log-probabilities, so it has the bits of CausalLM's forward. Gradients of
the ranks, and then of the backward passes of a step, are added by one tree: a step over W ranks with n passes
each has the bits of one rank with W n of them. Data, optimizer, schedule, metrics and checkpoints are
torchtitan's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import BaseLoss
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from ..engine.train.parallel.fsdp import apply_fsdp_with_tree, read_pieces
from ..engine.train.parallel.gradient import GradientTree
from ..model.causal_lm import CausalLM
from ..model.checkpoint import resolve_model
from ..model.config import ModelConfig
from ..model.weights import Layout

_DEGREES = (
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)
_TIED = "lm_head.weight", "model.embed_tokens.weight"


class ExactModel(CausalLM, BaseModel):
    """CausalLM as a model of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """model: a Hugging Face folder, or a name on the hub. recompute: set by torchtitan's FullAC."""

        model: str
        recompute: bool = False

        def update_from_config(self, *, config: Trainer.Config, **_: Any) -> None:
            """Raises ValueError for a setting of the trainer that cannot be exact, by name."""
            for name, value, reason in _refused(config):
                raise ValueError(f"exact_torchtitan: {name} ({value!r}) is refused: {reason}")
            self.recompute = config.activation_checkpoint is not None

        def get_nparams_and_flops(self, model: CausalLM, seq_len: int) -> tuple[int, int]:
            """The parameters, and the floating-point operations of a token, as torchtitan counts them."""
            config = model.layout.config
            heads, widths = config.heads, 2 * config.head_dim
            return get_dense_model_nparams_and_flops(
                model, config.layers, heads, widths, seq_len, config.tied
            )

    def __init__(self, config: Config):
        """Without memory where torch's device is meta. Raises ValueError for a model zerokl does not know."""
        folder = resolve_model(config.model)
        layout = Layout(ModelConfig.from_file(folder))
        if layout.config.experts is not None:
            raise ValueError("exact_torchtitan: a mixture of experts is refused: its weights are not sharded")
        super().__init__(layout.config, recompute=config.recompute, layout=layout)
        self.layout, self.config, self.folder = layout, config, folder
        self.mesh: DeviceMesh | None = None  # of the ranks, once FSDP has sharded the model

    def verify_module_protocol(self) -> None:
        """The modules below hold Parameters only, and torchtitan builds none of them."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Read this rank's pieces of the model's folder."""
        assert self.mesh is not None, "torchtitan parallelizes a model before it initialises its states"
        read_pieces(self, self.folder, self.layout, self.mesh)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The log-probability of each label, [B, L] fp32; 0 without a label.

        tokens, labels [B, L]: a label is the token after its place, as torchtitan's datasets have it. A
        sequence begins at each row, and in a row where positions [B, L] is 0.
        """
        starts = torch.zeros_like(tokens, dtype=torch.bool) if positions is None else positions == 0
        starts[:, 0] = True
        places = torch.nonzero(starts.flatten()).flatten().tolist()
        return _after_each_token(self, tokens, labels, [*places, tokens.numel()])


def _after_each_token(
    model: CausalLM, tokens: torch.Tensor, labels: torch.Tensor, starts: list[int]
) -> torch.Tensor:
    """log_probs of CausalLM, whose labels stand at their own places: each sequence is one place longer."""
    ids, shifted, places = [], [], []
    for a, b in pairwise(starts):
        line, wanted = tokens.flatten()[a:b], labels.flatten()[a:b]
        ids += [line, line[:1]]  # nothing reads the last id: the label's own place
        shifted += [wanted.new_full((1,), -100), wanted]
        places.append(torch.arange(a, b) + len(places) + 1)
    cu_seqlens = [start + i for i, start in enumerate(starts)]
    output = CausalLM.forward(model, torch.cat(ids), labels=torch.cat(shifted), cu_seqlens=cu_seqlens)
    return output.log_probs[torch.cat(places).to(tokens.device)].view(tokens.shape)


class ExactLoss(BaseLoss):
    """The negative sum of the log-probabilities, over the tokens of all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """It has no settings."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        self.fn = lambda log_probs, labels: -log_probs.sum()


class ExactTrainer(Trainer):
    """torchtitan's trainer. The model is told the labels, and backward passes are added by the tree."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's settings."""

    def __init__(self, config: Config):
        """Raises ValueError for settings that cannot be exact, by name."""
        super().__init__(config)
        rounds, ranks = self.gradient_accumulation_steps, self.model_parts[0].mesh.size()
        for name, n in (("gradient accumulation steps", rounds), ("ranks", ranks)):
            if n & (n - 1):
                raise ValueError(f"exact_torchtitan: {name} ({n}) must be a power of two: a tree adds them")
        self._tree = GradientTree(rounds)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        inputs, labels, others = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, others | {"labels": labels}

    def forward_backward_step(self, **named: Any) -> torch.Tensor:
        """After the last backward of a step, the gradients are the tree's root."""
        loss = super().forward_backward_step(**named)
        model = self.model_parts[0]
        gradients = [p.grad.to_local() for p in model.parameters()]
        self._tree.push(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        if self._tree.pushed < self._tree.shards:
            model.zero_grad(set_to_none=True)  # else FSDP adds the next backward to this one
            return loss
        parts = self._tree.take().split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
        return loss


class HuggingFaceNames(StateDictAdapter):
    """The names of ExactModel are Hugging Face's already. A tied lm_head is in no checkpoint."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in state_dict.items() if not (self._tied and name == _TIED[0])}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return hf_state_dict | ({_TIED[0]: hf_state_dict[_TIED[1]]} if self._tied else {})

    @property
    def _tied(self) -> bool:
        return ModelConfig.from_file(resolve_model(self.model_config.model)).tied


def parallelize(model: ExactModel, *, parallel_dims: Any, training: Any, **others: Any) -> ExactModel:
    """Let FSDP shard the model over the ranks, whose gradients are added pairwise."""
    model.mesh = parallel_dims.get_mesh("fsdp")
    tree = apply_fsdp_with_tree(model, model.mesh, TORCH_DTYPE_MAP[training.mixed_precision_param])
    tree.begin([True] * model.mesh.size(), is_zero=False)
    return model


def exact_spec(model: str) -> ModelSpec:
    """What torchtitan's trainer needs of a model. model: a Hugging Face folder, or a name on the hub."""
    return ModelSpec(
        name="zerokl",
        flavor=model,
        model=ExactModel.Config(model=model),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=HuggingFaceNames,
    )


def _refused(config: Trainer.Config) -> Iterator[tuple[str, Any, str]]:
    """The settings that are on and cannot be exact: name, value, reason."""
    p, t, checkpointing = config.parallelism, config.training, config.activation_checkpoint
    for name in _DEGREES:
        if getattr(p, name) > 1:
            yield f"parallelism.{name}", getattr(p, name), "every rank computes whole sequences and layers"
    classes = (config, ExactTrainer.Config), (config.loss, ExactLoss.Config)
    for value, wanted in classes:
        if not isinstance(value, wanted):
            yield "a Config", type(value).__qualname__, f"it must be {wanted.__qualname__}"
    if not (checkpointing is None or isinstance(checkpointing, FullAC.Config)):
        yield "activation_checkpoint", type(checkpointing).__qualname__, "set FullAC, or None"
    settings = (
        ("parallelism.spmd_backend", p.spmd_backend, "partial_dtensor", "weights are sharded by FSDP alone"),
        ("training.dtype", t.dtype, "float32", "it is the dtype of the master weights"),
        ("training.enable_cpu_offload", t.enable_cpu_offload, False, "FSDP keeps the weights on the GPU"),
        ("training.disable_cuda_graphs", t.disable_cuda_graphs, True, "batches differ in shape"),
        ("compile.enable", config.compile.enable, False, "a compiled forward is not the kernels'"),
        ("validator.enable", config.validator.enable, False, "it does not tell the model its labels"),
    )
    for name, value, wanted, reason in settings:
        if value != wanted:
            yield name, value, f"it must be {wanted!r}: {reason}"
