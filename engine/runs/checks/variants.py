"""`zerokl variants`: a transformers model against itself, called in the ways in which trainers call it.

Each way scores the same completions. The report says which way changes bits, by how much, and at which module
first. Nothing is trained, and no other engine takes part.

Shapes: B sequences, T tokens of the longest, C completion tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....files.bitwise import count_unequal
from ....model.checkpoint import DTYPES
from ....verify.operation_outputs import first_divergence

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and completion
Outputs = dict[str, torch.Tensor]  # of each module that ran, the rows of one sequence's own tokens

# Padding tokens beside each sequence, where one is padded alone.
_PADDING = 5


@dataclass(frozen=True)
class Call:
    """How a model is called."""

    together: bool = False  # all sequences in one micro-batch, which pads them; else one by one
    side: str = ""  # "left" or "right": where one sequence is padded
    positions: bool = True  # position_ids count real tokens; else transformers chooses them
    mask: bool = True  # the attention mask is given
    train: bool = False
    gradient: bool = False
    checkpointing: bool = False
    autocast: bool = False


@dataclass(frozen=True)
class Way:
    """One way to call a model, beside the plain call: one sequence, eval mode, no padding, no gradient."""

    name: str
    call: Call
    remedy: str


_POSITIONS = "Give position_ids of (attention_mask.cumsum(-1) - 1).clamp(0)."
WAYS = (
    Way("gradients on", Call(gradient=True), "Score with the forward that the update uses."),
    Way("train mode", Call(train=True), "Set dropout to 0, or score old log-probabilities in eval mode."),
    Way(
        "gradient checkpointing",
        Call(train=True, gradient=True, checkpointing=True),
        "Score old log-probabilities with checkpointing as well.",
    ),
    Way("autocast to bf16", Call(autocast=True), "Use one autocast context for both forwards."),
    Way("micro-batch of all", Call(together=True, side="right"), "Score and train in equal micro-batches."),
    Way("right padding", Call(side="right"), "Pack sequences, or pad both forwards alike."),
    Way("left padding", Call(side="left"), "Pack sequences, or pad both forwards alike."),
    Way("left padding without position_ids", Call(side="left", positions=False), _POSITIONS),
    Way(
        "left padding without a mask",
        Call(side="left", positions=False, mask=False),
        "Give the attention mask: without it, attention reads the padding.",
    ),
)


def vocabulary(config: Mapping[str, Any]) -> int:
    """The vocabulary of any architecture, from its config.json. Raises ValueError where none is named."""
    text = config.get("text_config") if isinstance(config, Mapping) else None
    for fields in (config, text):
        if isinstance(fields, Mapping) and type(fields.get("vocab_size")) is int and fields["vocab_size"] > 0:
            return fields["vocab_size"]
    raise ValueError("variants: the model's config.json names no vocab_size")


def compare_ways(
    folder: Path, pairs: Sequence[Pair], dtype: str, device: torch.device
) -> list[dict[str, Any]]:
    """For each way how many log-probabilities have other bits than in the plain call, and where first.

    Raises ValueError for a dtype that is not known, and for a model that transformers cannot compute with.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would be written across the table
    logging.set_verbosity_error()  # what it warns of is refused below, in one line
    if dtype not in DTYPES:
        raise ValueError(f"variants: dtype {dtype} is not known; choose {', '.join(DTYPES)}")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], output_loading_info=True, ignore_mismatched_sizes=True
        )
        _refuse_random_weights(folder, loading)
        model.to(device)
        plain = _run(model, pairs, Call())
        return [_row(way, plain, _run(model, pairs, way.call)) for way in WAYS]
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # a library may raise anything
        raise ValueError(
            f"variants: transformers could not compute with {folder} ({type(error).__name__}: {error})"
        ) from error


def _refuse_random_weights(folder: Path, loading: Mapping[str, Any]) -> None:
    """Raise ValueError where transformers filled in weights at random, because the folder lacks them."""
    lacking = sorted(loading["missing_keys"]) + sorted(name for name, *_ in loading["mismatched_keys"])
    if lacking:
        raise ValueError(
            f"variants: {folder} lacks {len(lacking)} weights, or has them in another shape; "
            f"the first is {lacking[0]}"
        )


def _row(way: Way, plain: list[Outputs], other: list[Outputs]) -> dict[str, Any]:
    """How one way differs from the plain call."""
    pairs = [(a["logprob"], b["logprob"]) for a, b in zip(plain, other, strict=True)]
    unequal = sum(count_unequal(x, y) for x, y in pairs)
    first = next(filter(None, map(first_divergence, plain, other)), None)
    return {
        "way": way.name,
        "tokens": sum(len(x) for x, _ in pairs),
        "unequal": unequal,
        "max_abs": max(float((x - y).abs().max()) for x, y in pairs),
        "first": first.op if first else "",
        "remedy": way.remedy if unequal else "",
    }


def _run(model: torch.nn.Module, pairs: Sequence[Pair], call: Call) -> list[Outputs]:
    """The outputs of every module, and the logprobs [C], for each pair."""
    groups = [pairs] if call.together else [[pair] for pair in pairs]
    outputs = []
    with _mode(model, call):
        for group in groups:
            outputs += _forward(model, group, call)
    return outputs


@contextmanager
def _mode(model: torch.nn.Module, call: Call) -> Iterator[None]:
    """The model in train or eval mode, with or without checkpointing, autocast and gradients."""
    model.train(call.train)
    if call.checkpointing:
        _switch(model, "enable")({"use_reentrant": False})
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.gradient))
        if call.autocast:
            stack.enter_context(torch.autocast(model.device.type, torch.bfloat16))
        yield
    if call.checkpointing:
        _switch(model, "disable")()
    model.eval()


def _switch(model: torch.nn.Module, word: str) -> Callable[..., None]:
    """The method that turns checkpointing on or off; transformers 5 renamed it in a later release."""
    newer, older = f"activation_checkpointing_{word}", f"gradient_checkpointing_{word}"
    return getattr(model, newer if hasattr(model, newer) else older)


def _forward(model: torch.nn.Module, pairs: Sequence[Pair], call: Call) -> list[Outputs]:
    """One forward over a micro-batch."""
    inputs = [[*prompt, *completion[:-1]] for prompt, completion in pairs]
    length = max(map(len, inputs)) + (_PADDING if call.side and not call.together else 0)
    starts = [length - len(ids) if call.side == "left" else 0 for ids in inputs]
    ids = torch.zeros(len(pairs), length, dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    for i, (row, start) in enumerate(zip(inputs, starts, strict=True)):
        ids[i, start : start + len(row)] = torch.tensor(row, device=model.device)
        mask[i, start : start + len(row)] = 1
    given = {"attention_mask": mask} if call.side and call.mask else {}
    if call.side and call.positions:
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with _recorded(model) as recorded:
        logits = model(ids, use_cache=False, **given).logits
    results = []
    for i, ((_, completion), row, start) in enumerate(zip(pairs, inputs, starts, strict=True)):
        real = slice(start, start + len(row))  # without padding
        outputs = {name: x[i, real] for name, x in recorded.items()}
        rows = logits[i, real][-len(completion) :].detach().float()
        targets = torch.tensor(list(completion), device=rows.device).unsqueeze(1)
        outputs["logprob"] = torch.log_softmax(rows, -1).gather(1, targets).squeeze(1)
        results.append({name: x.cpu() for name, x in outputs.items()})
    return results


@contextmanager
def _recorded(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The outputs [B, T, ...] of all modules without children, in the order in which they run."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim >= 3:
                outputs.setdefault(name, output.detach())

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(keep(name)) for name, module in leaves]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
