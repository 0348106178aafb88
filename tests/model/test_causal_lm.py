"""The model as a torch module: the decoder's bits, Hugging Face's names, torch's ways to handle it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model import one_pass
from zerokl.model.causal_lm import CausalLM, CausalLMOutput
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.prompts import PromptLayout, Prompts, prompt_passes
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout

from tests.helpers import DTYPES, randint, randn, total_unequal
from tests.model.checkpoints import JUDGED_FAMILIES, Pairs, checkpoint_parts, save_random
from tests.model.test_prompts import make_pairs

SAMPLING = SamplingParams(0.9)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(scope="module", params=JUDGED_FAMILIES)
def folder(request, tmp_path_factory):
    return save_random(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return save_random("qwen3", tmp_path_factory.mktemp("qwen"))


def upstream(pairs: Pairs) -> list[torch.Tensor]:
    return [randn(i, len(completion)) for i, (_, completion) in enumerate(pairs)]


def of_trainer(decoder: Decoder, pairs: Pairs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """logp, and gradients by the names of the checkpoint, as a virtual shard has them: prompts first, then
    micro-batches of two samples, into buffers.
    """
    weights = [*decoder.w.values(), *([decoder.lm_head] if decoder.config.tied else [])]
    buffers, logps, dy = {w: GradBuffer.like(w) for w in weights}, [], upstream(pairs)
    for part in prompt_passes([prompt for prompt, _ in pairs]):
        places = list(range(part.start, part.stop))
        prompts = Prompts(decoder, [pairs[i][0] for i in places], buffers=buffers)
        for a in range(0, len(places), 2):
            chosen = places[a : a + 2]
            batch = pack([pairs[i] for i in chosen], prompts.prompt_of_sample[a : a + 2])
            logp, _ = logprobs(decoder, batch, SAMPLING, prompts=prompts)
            (logp * torch.cat([dy[i] for i in chosen])).sum().backward()
            logps.append(logp.detach())
        prompts.backward()
    sums = {name: buffers[w].zeroed([0])[0] for name, w in decoder.w.items()}
    if decoder.config.tied:
        sums["embed"] = sums["embed"] + buffers[decoder.lm_head].zeroed([0])[0]
    parts: dict[str, torch.Tensor] = {}
    for entry in decoder.layout.trained:
        rows = sums[entry.name].split([n for _, n in entry.parts])
        parts |= zip((name for name, _ in entry.parts), rows, strict=True)
    return torch.cat(logps), parts


def of_module(model: CausalLM, pairs: Pairs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same by one forward and one backward of the module."""
    prompts = [prompt for prompt, _ in pairs]
    batch = pack(pairs, PromptLayout(prompts).prompt_of_sample)
    scores = model.score(batch, SAMPLING, prompts)
    (scores.logp * torch.cat(upstream(pairs))).sum().backward()
    never_trained = Layout(model.config).buffers
    return scores.logp.detach(), {n: p.grad for n, p in model.named_parameters() if n not in never_trained}


def unequal(model: CausalLM, pairs: Pairs, trainer: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> int:
    (logp, gradients), (wanted_logp, wanted) = of_module(model, pairs), trainer
    assert gradients.keys() == wanted.keys()
    assert all(g.dtype == torch.float32 for g in gradients.values())
    return total_unequal([logp, *gradients.values()], [wanted_logp, *(wanted[n] for n in gradients)])


@dtypes
def test_one_backward_has_the_trainers_gradient(folder, dtype):
    """Several passes of prompts; a prompt of one token; Parameters in one memory and each in its own."""
    decoder = load_decoder(folder, dtype)
    pairs = make_pairs([(40, [20, 30]), (300, [5, 9]), (1, [7]), (290, [12, 3, 4])])
    if decoder.config.states:  # a prompt is read with each sample, but for its first token
        pairs = [(prompt[:1], prompt[1:] + completion) for prompt, completion in pairs]
    trainer, model = of_trainer(decoder, pairs), CausalLM.over(decoder)
    assert unequal(model, pairs, trainer) == 0
    apart = CausalLM(decoder.config, dtype, recompute=True)
    apart.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    assert unequal(apart, pairs, trainer) == 0


def test_control_one_pass_in_place_of_two_is_seen(qwen, monkeypatch):
    """Another order of the token blocks than the trainer's."""
    decoder, pairs = load_decoder(qwen, torch.float32), make_pairs([(300, [20, 30]), (290, [12, 3])])
    plain = one_pass._order

    def all_samples_first(lengths, layout, passes, padding):
        order, in_order = plain(lengths, layout, [slice(0, len(lengths))], padding)
        return order, in_order

    trainer = of_trainer(decoder, pairs)
    monkeypatch.setattr(one_pass, "_order", all_samples_first)
    assert unequal(CausalLM.over(decoder), pairs, trainer) > 0


def padded(sequences: list[list[int]], left: bool) -> tuple[torch.Tensor, ...]:
    width = max(map(len, sequences)) + 3
    ids, mask = torch.full((len(sequences), width), 5), torch.zeros(len(sequences), width, dtype=torch.int64)
    for b, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[b, place], mask[b, place] = torch.tensor(sequence), 1
    return ids, mask


def test_padded_packed_and_alone_are_equal(qwen):
    model = CausalLM.from_pretrained(qwen, torch.bfloat16)
    sequences = [randint(i, 128, n).tolist() for i, n in enumerate((30, 7, 45))]

    def results(output: CausalLMOutput, mask: torch.Tensor) -> list[torch.Tensor]:
        outputs = (output.log_probs, output.entropy, output.logits)
        return [x.detach()[mask.bool()] for x in outputs]

    alone = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        labels = ids.clone()
        labels[:, 0] = -100
        alone.append(results(model(ids, labels=labels, logits=True), torch.ones_like(ids)))
    wanted = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for left in (False, True):
        ids, mask = padded(sequences, left)
        labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
        output = model(ids, mask, labels, logits=True)
        assert total_unequal(results(output, mask), wanted) == 0
        assert not output.log_probs[labels == -100].any()
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    ends = [0, 30, 37, 82]
    labels = ids.clone()
    labels[ends[:-1]] = -100
    output = model(ids, labels=labels, cu_seqlens=ends, logits=True)
    assert total_unequal(results(output, torch.ones_like(ids)), wanted) == 0
    whole = torch.log_softmax(output.logits.float(), -1)[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(output.log_probs[1:][labels[1:] != -100], whole[labels[1:] != -100])


def test_names_and_values_are_those_of_transformers(folder, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = {
        n: x for name, p in reference.state_dict().items() for n, x in checkpoint_parts(name, p, reference)
    }
    ours = CausalLM.from_pretrained(folder)
    assert ours.state_dict().keys() == state.keys()
    assert total_unequal(list(ours.state_dict().values()), [state[n] for n in ours.state_dict()]) == 0
    empty = CausalLM(ours.config)
    empty.load_state_dict(state)
    empty.save_pretrained(tmp_path / "saved")
    for again in (CausalLM.from_pretrained(tmp_path / "saved"), empty):
        assert total_unequal(list(again.parameters()), list(ours.parameters())) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert total_unequal(list(back.state_dict().values()), list(reference.state_dict().values())) == 0
    ids = torch.tensor([randint(0, 128, 20).tolist()])
    torch.testing.assert_close(ours(ids, logits=True).logits, reference(ids).logits, rtol=1e-3, atol=1e-3)


def test_hooks_of_the_model_and_of_every_layer_fire(qwen):
    model, fired = CausalLM.from_pretrained(qwen), []
    for name, module in [("model", model), *enumerate(model.model.layers)]:
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(("pre", name)))
        module.register_forward_hook(lambda *_, name=name: fired.append(("forward", name)))
        if name != "model":
            module.register_full_backward_hook(lambda *_, name=name: fired.append(("backward", name)))
    ids, seen = torch.tensor([[1, 2, 3]]), []
    labels = torch.tensor([[-100, 2, 3]])
    output = model(ids, labels=labels, hook=lambda name, x: seen.append(name))
    output.log_probs.sum().backward()
    assert fired == [
        *[("pre", "model"), ("pre", 0), ("forward", 0), ("pre", 1), ("forward", 1), ("forward", "model")],
        *[("backward", 1), ("backward", 0)],
    ]
    assert (seen[0], seen[-1]) == ("embed", "logprob")


def test_to_meta_and_copies_keep_one_memory_and_the_bits(qwen):
    pairs = make_pairs([(40, [20, 30]), (12, [5])])
    trainer = of_trainer(load_decoder(qwen, torch.bfloat16), pairs)
    model = CausalLM.from_pretrained(qwen).to(torch.bfloat16)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert unequal(model, pairs, trainer) == 0
    meta = CausalLM(model.config, torch.bfloat16, device="meta").to_empty(device="cpu")
    meta.load_state_dict(model.state_dict())
    assert unequal(meta, pairs, trainer) == 0
    deep = copy.deepcopy(model)
    deep.zero_grad()
    with torch.no_grad():
        next(model.parameters()).zero_()  # the copy does not see it
    assert unequal(deep, pairs, trainer) == 0


def test_frozen_parameters_have_no_gradient_and_change_no_other(qwen):
    decoder, pairs = load_decoder(qwen, torch.bfloat16), make_pairs([(40, [20, 30])])
    _, wanted = of_trainer(decoder, pairs)
    model = CausalLM.over(decoder)
    frozen = {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    }
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    _, gradients = of_module(model, pairs)
    assert {name for name, g in gradients.items() if g is None} == frozen
    rest = [name for name in gradients if name not in frozen]
    assert total_unequal([gradients[n] for n in rest], [wanted[n] for n in rest]) == 0


def test_a_wider_lm_head_has_an_unrounded_gradient(qwen):
    numerics = Numerics(lm_head=torch.float32)
    decoder, pairs = load_decoder(qwen, torch.bfloat16, numerics=numerics), make_pairs([(40, [20, 30])])
    assert unequal(CausalLM.over(decoder), pairs, of_trainer(decoder, pairs)) == 0


def test_the_policys_module_shares_its_weights(qwen):
    decoder = load_decoder(qwen, torch.float32)
    model = CausalLM.over(decoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = make_pairs([(4, [3])])
    of_module(model, pairs)
    before, _ = logprobs(decoder, pack(pairs), SAMPLING)
    optimizer.step()
    after, _ = logprobs(decoder, pack(pairs), SAMPLING)
    assert total_unequal([after.detach()], [model.score(pack(pairs), SAMPLING).logp.detach()]) == 0
    assert total_unequal([after.detach()], [before.detach()]) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(labels=torch.tensor([[1, 2, 3]])), "sequence 0 has a label on its first token"),
        (
            dict(labels=torch.tensor([[-100, 2, 3]]), attention_mask=torch.tensor([[1, 1, 0]])),
            "label is on padding",
        ),
        (dict(), "neither labels are given nor logits"),
        (dict(labels=torch.tensor([1, 2])), "must be that of input_ids"),
        (dict(logits=True, cu_seqlens=[0, 3]), "must be \\[B, L\\]"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(qwen, given, message):
    with pytest.raises(ValueError, match=message):
        CausalLM.from_pretrained(qwen)(torch.tensor([[1, 2, 3]]), **given)
