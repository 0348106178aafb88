"""The whole decoder beside transformers: log-probabilities, a loss and every gradient, judged by fp64."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.logprob import head_logits
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.prompts import Prompts
from zerokl.model.routing import RecordedRouting
from zerokl.model.scoring import logprobs, pack

from tests.helpers import assert_at_most_twice_the_error, randn
from tests.model.checkpoints import (
    FAMILIES,
    JUDGED_FAMILIES,
    Pairs,
    judge,
    logprobs_and_gradients,
    plain,
    save_random,
    sequence_losses,
)

PAIRS: Pairs = [
    ([1, 2, 3], [4, 5, 6, 7]),
    (list(range(1, 40)), list(range(20, 60))),
    ([3], [9]),
    ([9] * 20, [8, 7, 6] * 5),
    ([100, 50], list(range(127, 90, -2))),
    (list(range(70, 103)), [5, 6, 7]),
    (list(range(70, 103)), list(range(1, 36))),
    (list(range(70, 103)), [127]),
]
DY = randn(0, sum(len(c) for _, c in PAIRS))
# The errors of all these models are judged together, because the errors of a single model are noisy. Those of
# bf16 are less so, and a model has many more logits than weights of a norm.
SEEDS, SEEDS_IN_BF16, SEEDS_OF_LOGITS = range(16), 6, 4


def zerokl_results(folder, dtype: torch.dtype, shared: bool) -> dict[str, torch.Tensor]:
    """Our results as `logprobs_and_gradients` gives those of transformers.

    All sequences are packed into one forward. Gradients are taken from buffers. With `shared`, prompts
    are read once.
    """
    plain = load_decoder(folder, dtype)
    decoder = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(prompts_once=shared))
    flat = torch.zeros(decoder.layout.numel, dtype=torch.promote_types(dtype, torch.float32))
    views = decoder.layout.views(flat)
    buffers = {weight: GradBuffer(views[name].unsqueeze(0)) for name, weight in decoder.w.items()}
    if decoder.config.tied:
        buffers[decoder.lm_head] = GradBuffer(torch.zeros_like(views["embed"]).unsqueeze(0))
    prompts = Prompts(decoder, [prompt for prompt, _ in PAIRS], buffers=buffers) if shared else None
    packed = pack(PAIRS, prompts.prompt_of_sample if prompts else None)
    logp, _ = logprobs(decoder, packed, SamplingParams(), prompts=prompts, buffers=buffers)
    losses = sequence_losses(logp, PAIRS, DY)
    losses.sum().backward()
    if prompts:
        prompts.backward()
    if decoder.config.tied:
        views["embed"] += buffers[decoder.lm_head].sums[0]
    gradients = decoder.layout.checkpoint_views(flat)
    for name in decoder.layout.buffers:
        assert not gradients.pop(name).any(), "no gradient reaches a buffer"
    return {"logp": logp.detach(), "losses": losses.detach(), **gradients}


class Judged(NamedTuple):
    """The folders of one family, one a seed, and results of a folder: the judge's, and others' by dtype."""

    folders: list[Path]
    exact: Callable[[Path], dict[str, torch.Tensor]]
    transformers: Callable[[Path, torch.dtype], dict[str, torch.Tensor]]


def _away_from_clamps(folder: Path) -> bool:
    """Whether no input of a clamp of gpt-oss's experts lies within 1e-5 of its limit.

    There its derivative jumps, so a rounding of 3e-7 before it changes gradients by all that they are. The
    edge itself is judged in tests/kernels/test_clamped_experts.py.
    """
    if ModelConfig.from_file(folder).architecture != "GptOssForCausalLM":
        return True
    model, inputs = judge(folder), []
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    for module in experts:
        apply = module._apply_gate
        module._apply_gate = lambda x, apply=apply: inputs.append(x.detach()) or apply(x)
    logprobs_and_gradients(model, PAIRS, DY)
    return all(float((x.abs() - experts[0].limit).abs().min()) > 1e-5 for x in inputs)


@pytest.fixture(scope="module", params=JUDGED_FAMILIES)
def judged(request, tmp_path_factory) -> Judged:
    folders = [
        save_random(request.param, tmp_path_factory.mktemp(request.param), seed, "200KB") for seed in SEEDS
    ]
    folders = [folder for folder in folders if _away_from_clamps(folder)]
    assert len(folders) >= 4
    return Judged(
        folders,
        cache(lambda folder: logprobs_and_gradients(judge(folder), PAIRS, DY)),
        cache(lambda folder, dtype: logprobs_and_gradients(plain(folder, dtype), PAIRS, DY)),
    )


@torch.no_grad()
def _chosen(model: PreTrainedModel) -> torch.Tensor:
    """The experts that transformers' routers choose for each row, [T, L, k], by their ids."""
    rows, ids = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, inputs, outputs: ids.append(outputs[2].flatten(0, -2)))
    for prompt, completion in PAIRS:
        model(torch.tensor([prompt + completion]), use_cache=False)
        rows.append(torch.stack(ids, dim=1))
        ids.clear()
    return torch.cat(rows).sort(dim=2).values


@torch.no_grad()
def _chosen_by_zerokl(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """As _chosen, of our routers."""
    decoder, ids = load_decoder(folder, dtype), [prompt + completion for prompt, completion in PAIRS]
    routing = RecordedRouting(decoder.config.experts)
    context = PackedContext([len(row) for row in ids], decoder.config, routing=routing)
    decoder.hidden(torch.tensor([i for row in ids for i in row]), context)
    return routing.taken().long().sort(dim=2).values


def _without_other_choices(folders: Sequence[Path], dtype: torch.dtype) -> list[Path]:
    """The folders in which all rows have the experts that fp64 chooses, in our model and in transformers'."""
    same = []
    for folder in folders:
        exact = _chosen(judge(folder))
        rounded = _chosen(plain(folder, dtype)), _chosen_by_zerokl(folder, dtype)
        if all(torch.equal(exact, ids) for ids in rounded):
            same.append(folder)
    return same


shared = pytest.mark.parametrize("shared", [False, True], ids=["whole sequences", "prompts once"])


def _skip_chaotic(folder: Path, dtype: torch.dtype) -> None:
    """Skip experts in bf16: where a rounding chooses another expert, the error is that of the choice.

    The accuracy of experts that are given is judged in tests/kernels/test_accuracy.py.
    """
    if dtype == torch.bfloat16 and ModelConfig.from_file(folder).experts:
        pytest.skip("a rounding chooses another expert")


@shared
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_is_at_most_twice_that_of_transformers(judged, dtype, shared):
    _skip_chaotic(judged.folders[0], dtype)
    _judge_errors(judged, judged.folders[: SEEDS_IN_BF16 if dtype == torch.bfloat16 else None], dtype, shared)


@pytest.mark.full
def test_error_of_experts_in_fp16_is_at_most_twice_that_of_transformers(judged):
    """Of the models in which no rounding chooses another expert; in bf16 they are too few."""
    if not ModelConfig.from_file(judged.folders[0]).experts:
        pytest.skip("it has no experts, and is judged in bf16")
    folders = _without_other_choices(judged.folders[:10], torch.float16)
    assert len(folders) >= 3
    _judge_errors(judged, folders, torch.float16, shared=False)


def _judge_errors(judged: Judged, folders: Sequence[Path], dtype: torch.dtype, shared: bool) -> None:
    ours = [zerokl_results(folder, dtype, shared) for folder in folders]
    exact = [judged.exact(folder) for folder in folders]
    transformers = [judged.transformers(folder, dtype) for folder in folders]
    assert ours[0].keys() == transformers[0].keys() == exact[0].keys()
    for name in exact[0]:
        stacked = (torch.stack([r[name] for r in runs]) for runs in (ours, transformers, exact))
        assert_at_most_twice_the_error(*stacked, name)


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_of_every_logit_is_at_most_twice_that_of_transformers(judged, dtype):
    folders, ids = judged.folders[:SEEDS_OF_LOGITS], [[*prompt, *completion] for prompt, completion in PAIRS]
    _skip_chaotic(folders[0], dtype)
    ours, transformers, exact = [], [], []
    for folder in folders:
        decoder = load_decoder(folder, dtype)
        context = PackedContext([len(row) for row in ids], decoder.config)
        hidden = decoder.hidden(torch.tensor([i for row in ids for i in row]), context)
        ours.append(head_logits(hidden, decoder.logits_weight(), decoder.config.head.cap))
        for logits, model in ((transformers, plain(folder, dtype)), (exact, judge(folder))):
            logits.append(torch.cat([model(torch.tensor([row]), use_cache=False).logits[0] for row in ids]))
    assert_at_most_twice_the_error(*map(torch.stack, (ours, transformers, exact)), "logits")


@shared
def test_fp64_decoder_and_judge_are_one_function(judged, shared):
    """The decoder in fp64 is 2^20 times nearer to the judge than in fp32: only rounding separates the two.

    The gradient of an expert that no token has is 0 in all three. A gated delta net adds up decays in fp64 in
    any dtype, and takes differences of these sums. So its fp64 is less nearer than its fp32: 2^12 times.
    """
    nearer = 2**12 if ModelConfig.from_file(judged.folders[0]).states else 2**20
    for folder in judged.folders[:2]:
        ours, single = (zerokl_results(folder, dtype, shared) for dtype in (torch.float64, torch.float32))
        for name, value in judged.exact(folder).items():
            assert (ours[name] - value).norm() * nearer <= (single[name].double() - value).norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_frequencies_are_those_of_transformers(family, tmp_path):
    folder = save_random(family, tmp_path)
    config, model = ModelConfig.from_file(folder), plain(folder, torch.float32)
    rotary = model.model.rotary_emb
    for i, theta in enumerate(config.local_rope_thetas):
        by_type = len(set(config.local_rope_thetas)) > 1
        name = f"{model.config.layer_types[i]}_inv_freq" if by_type else "inv_freq"
        frequencies = getattr(rotary, name).double()
        ours = torch.tensor(config.rotating(i).frequencies, dtype=torch.float64)
        # transformers computes its frequencies with a few fp32 operations.
        assert ((ours - frequencies).abs() <= 4 * 2.0**-24 * frequencies).all(), theta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_control_a_wrong_weight_is_found(judged, dtype):
    """A norm whose factors are about 5% larger exceeds the allowed error."""
    folder, exact = judged.folders[0], judged.exact(judged.folders[0])
    _skip_chaotic(folder, dtype)
    allowed = logprobs_and_gradients(plain(folder, dtype), PAIRS, DY)["logp"]
    decoder = load_decoder(folder, dtype)
    with torch.no_grad():
        decoder.w["norm"].mul_(1.05).add_(0.05 * decoder.config.norm_plus_one)
        logp = logprobs(decoder, pack(PAIRS), SamplingParams())[0]
    with pytest.raises(AssertionError, match="logp"):
        assert_at_most_twice_the_error(logp, allowed, exact["logp"], "logp")
