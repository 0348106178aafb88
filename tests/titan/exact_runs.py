"""A few steps of torchtitan's own trainer with zerokl's model, on a CPU; a process of torchrun is a rank.

torchrun --nproc_per_node 2 -m tests.titan.exact_runs MODEL OUT DTYPE [--accumulated]

--accumulated plants a fault: FSDP adds up the backward passes of a step, in their order.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils

# torchtitan asks for CUDA where it finds no accelerator.
titan_utils.device_type = "cpu"
titan_utils.device_module = SimpleNamespace(
    set_device=lambda _: None,
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    reset_peak_memory_stats=lambda *_: None,
    memory_stats=lambda *_: {},
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
)
if not hasattr(dist, "set_timeout"):  # its name before torch 2.14
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
titan_utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from zerokl.integrations.exact_torchtitan import ExactLoss, ExactTrainer, exact_spec
from zerokl.model.causal_lm import CausalLM

STEPS, SEQUENCES, L, VOCABULARY = 3, 4, 12, 60


def sequence(i: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sequence i of the run, [1, L]: two documents, and some labels that are not scored."""
    ids = torch.randint(0, VOCABULARY, (1, L + 1), generator=torch.Generator().manual_seed(i))
    positions, labels = torch.arange(L)[None].clone(), ids[:, 1:].clone()
    cut = 3 + i % 5
    positions[:, cut:] -= cut
    labels[:, cut - 1] = -100
    return {"input": ids[:, :-1].clone(), "positions": positions}, labels


class Sequences(BaseDataLoader):
    """Sequence number j W + r of a step is rank r's, in its backward j."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any):
        self.size, self.rank = dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return (sequence(i) for i in range(self.rank, 1 << 20, self.size))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The ids are made up."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Accumulated(ExactTrainer):
    """The planted fault."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExactTrainer.Config):
        pass

    def forward_backward_step(self, **named: Any) -> torch.Tensor:
        return Trainer.forward_backward_step(self, **named)


def settings(model: str, out: str, dtype: str, trainer: type[ExactTrainer]) -> ExactTrainer.Config:
    return trainer.Config(
        model_spec=exact_spec(model),
        loss=ExactLoss.Config(),
        dump_folder=out,
        tokenizer=NoTokenizer.Config(),
        dataloader=Sequences.Config(),
        activation_checkpoint=None,
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=SEQUENCES,
            seq_len=L,
            max_norm=1e9,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=dtype,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(enable_structured_logging=False),
    )


def alone(model: str, dtype: str) -> list[float]:
    """The loss of each sequence of the first step, by zerokl's module in one process."""
    module = CausalLM.from_pretrained(model, getattr(torch, dtype))
    labelled = sum(int((sequence(i)[1] != -100).sum()) for i in range(SEQUENCES))
    losses = []
    for i in range(SEQUENCES):
        inputs, labels = sequence(i)
        ids, (cut,) = inputs["input"][0], torch.nonzero(inputs["positions"][0] == 0)[1:, 0].tolist()
        total = []
        for line, wanted in ((ids[:cut], labels[0, :cut]), (ids[cut:], labels[0, cut:])):
            whole = torch.cat([line, line[:1]])
            whole_labels = torch.cat([wanted.new_tensor([-100]), wanted])
            total.append(module(whole[None], labels=whole_labels[None]).log_probs[0, 1:])
        losses.append(float(-torch.cat(total).detach()[None].sum() / labelled))
    return losses


def main(model: str, out: str, dtype: str, *options: str) -> None:
    """Write OUT.RANK.json."""
    torch.set_num_threads(1)
    trainer_class = Accumulated if "--accumulated" in options else ExactTrainer
    trainer = settings(model, out, dtype, trainer_class).build()
    rank, losses = dist.get_rank(), []
    forward_backward = trainer.forward_backward_step

    def recorded(**named: Any) -> torch.Tensor:
        losses.append(float(forward_backward(**named).detach()))
        return torch.tensor(losses[-1])

    trainer.forward_backward_step = recorded
    trainer.train()
    digest = hashlib.sha256()
    for name, p in sorted(trainer.model_parts[0].named_parameters()):
        digest.update(name.encode() + p.detach().full_tensor().numpy().tobytes())
    report = {"losses": losses, "weights": digest.hexdigest()}
    if rank == 0:
        report["alone"] = alone(model, dtype)
    Path(f"{out}.{rank}.json").write_text(json.dumps(report))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
