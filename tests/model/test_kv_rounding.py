"""Quantised keys and values: against torch's own casts, attention in fp64, and chunks of any size."""

import pytest
import torch
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.kv_rounding import rounded_kv
from zerokl.model.quantisation import KvQuantisation
from zerokl.model.scoring import cached_scores, logprobs, pack

from tests.helpers import DTYPES, randint, randn, total_unequal
from tests.model.checkpoints import save_random

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SETTINGS = ["float8_e4m3fn/unit", "float8_e5m2/token", "float8_e4m3fn/token_head", "int8/token_head/pow2"]
QUICK = ("float8_e4m3fn/token_head", torch.bfloat16)  # the case of `make test`, where a case takes long
PAIRS = [([9, 8, 7], [5, 6, 7, 8]), ([2, 3] * 14, [3, 4, 5] * 3), ([4], [5] * 9)]
LONG = randint(1, 128, 30).tolist(), randint(2, 128, 60).tolist()


def cast(x: torch.Tensor, format: str) -> torch.Tensor:
    return x.round() if format == "int8" else x.to(getattr(torch, format)).float()


def by_hand(x: torch.Tensor, text: str) -> torch.Tensor:
    """x [T, Hkv, D] head by head, in its own dtype."""
    format, scale, *pow2 = text.split("/")
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            numbers, part = x[t, h].float(), (x[t] if scale == "token" else x[t, h]).float()
            s = torch.ones(()) if scale == "unit" else part.abs().max() / LARGEST[format]
            if pow2:
                s = torch.tensor(2.0) ** torch.log2(s.double()).ceil().float()
            out[t, h] = (cast(numbers / s, format) * s).to(x.dtype)
    return out


def numerics(text: str) -> Numerics:
    return Numerics(kv=KvQuantisation.parse(text))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", SETTINGS)
def test_each_head_of_each_token_is_rounded_by_itself(text, dtype):
    x = randn(3, 5, 4, 16, dtype=dtype, scale=2.0)
    got = rounded_kv(x, numerics(text))
    assert got.dtype == dtype
    assert count_unequal(got, by_hand(x, text)) == 0
    assert count_unequal(got, x) > 0, "control"
    alone = torch.cat([rounded_kv(x[t : t + 1], numerics(text)) for t in range(len(x))])
    assert count_unequal(got, alone) == 0
    others = [by_hand(x, other) for other in SETTINGS if other != text]
    assert all(count_unequal(got, other) > 0 for other in others), "control: each setting has its own bits"


def test_the_scale_is_of_a_token_or_of_one_of_its_heads():
    """A large head moves the other head of its token with one scale for both, and only then."""
    x = randn(1, 3, 2, 16)
    larger = x.clone()
    larger[1, 0] *= 37.0
    moved = {
        scale: [
            count_unequal(a, b) > 0
            for a, b in zip(
                *(rounded_kv(y, numerics(f"int8/{scale}"))[:, 1] for y in (x, larger)), strict=True
            )
        ]
        for scale in ("token", "token_head")
    }
    assert moved == {"token": [False, True, False], "token_head": [False, False, False]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random("qwen3", tmp_path_factory.mktemp("kv"))


def decoder_with(folder, dtype: torch.dtype, text: str) -> Decoder:
    plain = load_decoder(folder, dtype)
    return Decoder(plain.config, plain.flat.detach(), plain.layout, numerics(text)) if text else plain


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        pytest.param(text, dtype, marks=[] if (text, dtype) == QUICK else pytest.mark.full)
        for text in SETTINGS
        for dtype in DTYPES
    ],
    ids=str,
)
def test_a_cache_read_in_any_chunks_has_the_bits_of_the_trainer(folder, dtype, text):
    decoder = decoder_with(folder, dtype, text)
    assert decoder.cache_dtype == dtype
    with torch.no_grad():
        expected = [*logprobs(decoder, pack(PAIRS), SamplingParams())[0].split([len(c) for _, c in PAIRS])]
        plain = logprobs(decoder_with(folder, dtype, ""), pack(PAIRS), SamplingParams())[0]
    assert count_unequal(torch.cat(expected), plain) > 0, "control: without the rounding"
    for chunk in (1, 7):
        got = cached_scores(decoder, PAIRS, SamplingParams(), chunk)
        assert total_unequal([*map(torch.as_tensor, got)], expected) == 0


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence by its definition, in the dtype of q [T, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(0, 1)


class Attention:
    """One layer's attention as the decoder computed it, and the gradients that went through it."""

    def __init__(self, decoder: Decoder, layer: int):
        names = (f"layers.{layer}.{name}" for name in ("rope", "qkv", "attention"))
        self._seen: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        logp, _ = logprobs(decoder, pack([LONG]), SamplingParams(), self._hook)
        (logp * randn(0, len(logp))).sum().backward()
        self.rope, self.qkv, self.o = self._seen.values()
        self._heads, self._kv_heads = decoder.config.heads, decoder.config.kv_heads

    def _hook(self, name: str, x: torch.Tensor) -> None:
        if name in self._seen:
            x.retain_grad()
            self._seen[name] = x

    def again(self, text: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """o, and the gradients of q, k and v, from the same q, k, v and do, in another dtype.

        The keys and values are rounded by hand; the gradient takes the rounding as the identity.
        """
        # The last rows are padding, which is a sequence of its own.
        T, split = sum(map(len, LONG)) - 1, [self._heads, self._kv_heads]
        q, k = self.rope[:T].detach().split(split, 1)
        v = self.qkv[:T, -self._kv_heads :].detach()
        rounded = [by_hand(x, text) if text else x for x in (k, v)]
        leaves = [x.to(dtype).requires_grad_() for x in (q, *rounded)]
        o = causal(*leaves)
        o.backward(self.o.grad[:T].to(dtype))
        return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))

    @property
    def results(self) -> dict[str, torch.Tensor]:
        """The same of the decoder."""
        T, split = sum(map(len, LONG)) - 1, [self._heads, self._kv_heads]
        dq, dk = self.rope.grad[:T].split(split, 1)
        return {"o": self.o[:T].detach(), "dq": dq, "dk": dk, "dv": self.qkv.grad[:T, -self._kv_heads :]}


def error(results: dict[str, torch.Tensor], seen: Attention, how: str) -> float:
    """The norm of the error against fp64, of all results together, each divided by its own norm."""
    exact = seen.again(how, torch.float64)
    return float(torch.stack([(results[n] - x).norm() / x.norm() for n, x in exact.items()]).norm())


@pytest.mark.parametrize(
    "text", [pytest.param(x, marks=[] if x == QUICK[0] else pytest.mark.full) for x in SETTINGS]
)
def test_attention_and_its_gradients_are_those_of_the_rounded_keys_and_values(folder, text):
    """The error against fp64 is at most twice that of plain torch with the same keys and values."""
    decoder = decoder_with(folder, torch.float32, text)
    seen = Attention(decoder, 1)
    for how, holds in ((text, True), ("", False)):  # control: without the rounding
        ours, plain = error(seen.results, seen, how), error(seen.again(how, torch.float32), seen, how)
        assert (ours <= 2 * plain) == holds, how


def test_what_is_clipped_has_a_gradient_all_the_same():
    x = torch.tensor([[[500.0, -1e9, 3.0]]], requires_grad=True)
    y = rounded_kv(x, numerics("float8_e4m3fn/unit"))
    assert y.tolist() == [[[448.0, -448.0, 3.0]]]
    dy = randn(0, 1, 1, 3)
    y.backward(dy)
    assert count_unequal(x.grad, dy) == 0


def test_the_cache_holds_the_rounded_keys_and_values(folder):
    """So rounding them once more changes nothing, where a scale is a power of two."""
    ids = randint(0, 128, 50)
    for text in ("float8_e4m3fn/unit", "float8_e4m3fn/token_head/pow2"):
        decoder = decoder_with(folder, torch.bfloat16, text)
        cache = BlockCache(decoder.config, 2, decoder.cache_dtype)
        with torch.no_grad():
            decoder.hidden(ids, CachedContext(cache, [len(ids)], [0], [cache.allocate(2)]))
        kv = cache.data.flatten(0, 3).unsqueeze(1)  # [n, 1, D], a head of a token in each row
        assert kv.count_nonzero() > 0
        assert count_unequal(rounded_kv(kv, numerics(text)), kv) == 0
        assert count_unequal(rounded_kv(kv, numerics("int8/token_head")), kv) > 0, "control"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float8_e4m3fn/tensor", "SCALE one of unit, token, token_head"),
        ("fp8/unit", "FORMAT is one of float8_e4m3fn"),
        ("int8/unit", "with the scale 1 an int8 is a whole number"),
        ("float8_e5m2/unit/pow2", "the scale 1 is a power of two already"),
        ("int8/token/", "must be FORMAT/SCALE or FORMAT/SCALE/pow2"),
    ],
)
def test_another_setting_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        KvQuantisation.parse(text)
