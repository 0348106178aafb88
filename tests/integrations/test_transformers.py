"""`exact` on models of all families: the bits are the Decoder's, and the model stays a transformers model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.train.losses.policy_loss import LossConfig
from zerokl.engine.train.shard import Shard, ShardWork, shard_gradients
from zerokl.files.bitwise import equal
from zerokl.integrations.transformers import StaleWeightsError, exact
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack

from tests.helpers import assert_gradient_at_most_twice_the_error, randn, zero_buffers
from tests.model.checkpoints import (
    FAMILIES,
    JUDGED_FAMILIES,
    Pairs,
    checkpoint_parts,
    judge,
    logprobs_and_gradients,
    plain,
    save_random,
)

PAIRS: Pairs = [([1, 2, 3], [4, 5, 6, 7]), (list(range(1, 40)), list(range(20, 60))), ([3], [9])]
DY = randn(0, sum(len(c) for _, c in PAIRS))
WITH_BUFFER = "glm4_moe", "glm4_moe_lite", "deepseek_v3"  # see the refusal below
TAKEN = [family for family in FAMILIES if family not in WITH_BUFFER]
TRUNCATED = SamplingParams(temperature=0.7, top_k=20, top_p=0.95)
DTYPES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16 over fp32": (torch.float32, torch.bfloat16),
}


def padded(pairs: Pairs, left: int = 0) -> dict[str, torch.Tensor]:
    """The inputs [B, L] as TRL pads them: prompts on the left, completions on the right."""
    P, C = max(len(p) for p, _ in pairs) + left, max(len(c) for _, c in pairs)
    ids, labels = torch.zeros(len(pairs), P + C, dtype=torch.int64), torch.full((len(pairs), P + C), -100)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(pairs):
        place = slice(P - len(prompt), P + len(completion))
        ids[row, place], mask[row, place] = torch.tensor(prompt + completion), 1
        labels[row, P : place.stop] = torch.tensor(completion)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def results(model: PreTrainedModel, pairs: Pairs, dy: torch.Tensor, left: int = 0) -> dict[str, torch.Tensor]:
    """logp [C] and the gradients by the names of the checkpoint, of the loss dy . logp."""
    model.zero_grad()
    inputs = padded(pairs, left)
    output = model(**inputs, exact=True)
    logp = output.log_probs[inputs["labels"][:, 1:] != -100]
    (logp * dy).sum().backward()
    gradients = (checkpoint_parts(name, p.grad, model) for name, p in model.named_parameters())
    return {"logp": logp.detach(), **{name: g for parts in gradients for name, g in parts}}


def decoder_results(folder: Path, dtype: torch.dtype, params: SamplingParams) -> dict[str, torch.Tensor]:
    """The same of a Decoder that reads the checkpoint itself; gradients are fp32."""
    decoder = load_decoder(folder, dtype)
    buffers = zero_buffers([*decoder.w.values(), *([decoder.lm_head] if decoder.config.tied else [])])
    logp, _ = logprobs(decoder, pack(PAIRS), params, buffers=buffers)
    logp.backward(DY)
    return {"logp": logp.detach(), **gradients_of(decoder, buffers)}


def gradients_of(decoder, buffers) -> dict[str, torch.Tensor]:
    flat = torch.zeros(decoder.layout.numel)
    for name, view in decoder.layout.views(flat).items():
        view.copy_(buffers[decoder.w[name]].zeroed([0])[0])
    if decoder.config.tied:
        decoder.layout.views(flat)["embed"].add_(buffers[decoder.lm_head].zeroed([0])[0])
    return decoder.layout.checkpoint_views(flat)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not equal(left[name], right[name])] == []


@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_logprobs_and_gradients_are_the_decoders(family, dtypes, tmp_path):
    """A gradient is the Decoder's fp32 sum, rounded once to the Parameter's dtype."""
    (parameter_dtype, compute), folder = DTYPES[dtypes], save_random(family, tmp_path)
    model = load(folder, parameter_dtype).to(parameter_dtype)  # of gpt-oss norms stay fp32 beside fp16
    exact(model, compute, TRUNCATED)
    decoder = decoder_results(folder, compute or parameter_dtype, TRUNCATED)
    rounded = {name: x if name == "logp" else x.to(parameter_dtype) for name, x in decoder.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(results(model, PAIRS, DY), rounded)
    assert_equal(results(model, PAIRS, DY, left=5), rounded)  # more padding


def test_recomputing_decides_no_bit(tmp_path):
    folder = save_random("qwen3", tmp_path)
    kept, again = (load(folder, torch.float32) for _ in range(2))
    exact(kept)
    exact(again, recompute=True)
    assert_equal(results(kept, PAIRS, DY), results(again, PAIRS, DY))


def test_gradients_are_those_of_zerokls_trainer(tmp_path):
    """One virtual shard, and prompts of one token: the trainer reads longer ones once for all samples."""
    folder = save_random("qwen3", tmp_path)
    pairs = [(prompt[:1], completion) for prompt, completion in PAIRS]
    advantages = [0.5, -1.25, 2.0]
    decoder = load_decoder(folder, torch.float32)
    scored = [logprobs(decoder, pack([pair]), SamplingParams())[0].detach().numpy() for pair in pairs]
    rollouts = [
        Rollout.of_one_turn(i, 0, *pair, logp, "length", 0)
        for i, (pair, logp) in enumerate(zip(pairs, scored, strict=True))
    ]
    columns = [np.full(len(c), A) for (_, c), A in zip(pairs, advantages, strict=True)]
    buffers = zero_buffers([*decoder.w.values(), decoder.lm_head])
    work = ShardWork(SamplingParams(), LossConfig(), micro_batch=8)
    shard_gradients(decoder, [Shard(rollouts, columns, np.full(len(pairs), 0.25))], buffers, work)

    model = load(folder, torch.float32)
    exact(model)
    ours = results(model, pairs, torch.from_numpy(np.concatenate(columns) * -0.25).float())
    ours.pop("logp")
    assert_equal(ours, gradients_of(decoder, buffers))


@pytest.mark.parametrize("family", [x for x in JUDGED_FAMILIES if x not in WITH_BUFFER])
def test_the_error_is_at_most_twice_that_of_transformers(family, tmp_path):
    """Judged by fp64. The models of several seeds are judged together, as in tests/model."""
    ours, transformers, judged = [], [], []
    for seed in range(4):
        folder = save_random(family, tmp_path / str(seed), seed)
        model = load(folder, torch.float32)
        exact(model)
        ours.append(results(model, PAIRS, DY))
        transformers.append(logprobs_and_gradients(plain(folder, torch.float32), PAIRS, DY))
        judged.append(logprobs_and_gradients(judge(folder), PAIRS, DY))
    stacked = (
        {name: torch.stack([r[name] for r in runs]) for name in ours[0]}
        for runs in (ours, transformers, judged)
    )
    assert_gradient_at_most_twice_the_error(*stacked)


def test_the_weights_are_read_again_after_an_update(tmp_path):
    """A fused optimizer leaves p._version, by which a change could be seen, as it was."""
    folder = save_random("qwen3", tmp_path)
    model = load(folder, torch.float32)
    policy = exact(model)
    before = results(model, PAIRS, DY)
    version, weights = model.lm_head.weight._version, policy.check_fresh()
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
    with pytest.raises(StaleWeightsError, match=r"of model\.embed_tokens\.weight is not .*; 24 of 24 Param"):
        policy.check_fresh()
    after = results(model, PAIRS, DY)
    assert not equal(before["logp"], after["logp"])
    assert policy.check_fresh() != weights
    model.save_pretrained(tmp_path / "updated")
    assert equal(
        after["logp"], decoder_results(tmp_path / "updated", torch.float32, SamplingParams())["logp"]
    )
    assert model.lm_head.weight._version == version


def test_a_single_bit_of_a_copy_is_found(tmp_path):
    model = load(save_random("qwen3_moe", tmp_path), torch.bfloat16)
    policy = exact(model)
    with torch.no_grad():
        policy.decoder.w["layers.1.experts.down"].view(torch.int16)[-1, -1] ^= 1
    with pytest.raises(StaleWeightsError, match=r"layers\.1\.mlp\.experts\.down_proj is not .*; 1 of "):
        policy.check_fresh()


def test_parameters_without_gradients_and_batches_without_labels(tmp_path):
    model = load(save_random("qwen3", tmp_path), torch.float32)
    exact(model)
    model.model.norm.weight.requires_grad_(False)
    inputs = padded(PAIRS)
    inputs["labels"][:] = -100
    model(**inputs, exact=True).log_probs.sum().backward()
    assert model.model.norm.weight.grad is None
    assert all((p.grad == 0).all() for p in model.parameters() if p.requires_grad)


def test_the_models_own_forward_stays(tmp_path):
    model = load(save_random("qwen3", tmp_path), torch.float32)
    ids = torch.arange(12).view(2, 6)
    before = model(ids).logits
    exact(model)
    assert equal(before, model(ids).logits)
    assert set(model.state_dict()) == set(load(tmp_path, torch.float32).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "peft_config", {}), "has PEFT adapters, which are not supported"),
        (lambda m: setattr(m, "hf_quantizer", object()), "is quantised, which is not supported"),
        (lambda m: setattr(m.config, "attention_dropout", 0.1), "attention_dropout = 0.1 is not supported"),
        (lambda m: m.model.layers.append(torch.nn.Dropout(0.1)), r"has dropout \(0.1\)"),
        (
            lambda m: m.register_parameter("more", torch.nn.Parameter(torch.zeros(1))),
            "^exact: more is not the",
        ),
        (lambda m: m.model.norm.half(), "float16.* name one compute dtype"),
        (lambda m: m.double(), r"dtype \(torch.float64\) must be float32, bfloat16 or float16"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused(change, message, tmp_path):
    model = load(save_random("qwen3", tmp_path), torch.float32)
    change(model)
    with pytest.raises(ValueError, match=message) as refusal:
        exact(model)
    assert "\n" not in str(refusal.value)


def test_another_architecture_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=8))
    with pytest.raises(
        ValueError, match=r"architecture 'GPT2LMHeadModel' is not supported; supported are .*LlamaForCausalLM"
    ):
        exact(model)


@pytest.mark.parametrize("place", [(0, 0), (0, 36)], ids=["padding", "first token"])
def test_a_label_that_nothing_predicts_is_refused(place, tmp_path):
    model = load(save_random("qwen3", tmp_path), torch.float32)
    exact(model)
    inputs = padded(PAIRS)
    inputs["labels"][place] = 1
    with pytest.raises(ValueError, match=r"label is on padding|label on its first token"):
        model(**inputs, exact=True)


def test_a_model_with_a_buffer_beside_its_parameters_is_refused(tmp_path):
    model = load(save_random("glm4_moe", tmp_path), torch.float32)
    with pytest.raises(ValueError, match=r"gate\.e_score_correction_bias of a Glm4MoeForCausalLM is"):
        exact(model)
