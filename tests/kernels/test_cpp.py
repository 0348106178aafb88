"""The loops in C++ have the bits of the references, and run only where a probe finds so."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels import attention as attention_module
from zerokl.kernels import attention_cpp, attention_ref, backend, cpp
from zerokl.kernels import matmul as matmul_module
from zerokl.kernels.attention import attention, attention_cached, varlen_plan
from zerokl.kernels.attention_plan import KEY_TILE, AttentionPlan
from zerokl.kernels.attention_rule import WALK, AttentionRule
from zerokl.kernels.columns import add_columns
from zerokl.kernels.cpp import row_sums
from zerokl.kernels.decode_heads import CacheSlots, QKNormWeights, heads_to_cache
from zerokl.kernels.draw import drawn_logprobs
from zerokl.kernels.gelu_mul import gelu_mul
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.matmul import matmul, pack_weights
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.philox import Stream
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.uniforms import uniforms

from tests.helpers import forgotten, property_settings, randn, threads

pytestmark = pytest.mark.skipif(cpp.library() is None, reason="no C++ compiler, or a CPU without AVX2")
Tensors = Sequence[torch.Tensor]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SCALES = st.sampled_from([1e-44, 1e-30, 1e-3, 1.0, 1e4])
WIDTHS = st.integers(1, 20).map(lambda n: 16 * n)
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=5)


def with_gradients(
    op: Callable[..., torch.Tensor | Tensors], *inputs: torch.Tensor, seed: int = 0
) -> Tensors:
    """What the op returns, and the gradient of each input for a random gradient of the results."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    dys = [randn(seed + 50 + i, *y.shape, dtype=y.dtype) for i, y in enumerate(outputs)]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, inputs, dys))


def unequal(compute: Callable[[], Tensors], x: torch.Tensor) -> int:
    """Elements of what `compute` returns that differ between the loops and the references."""
    with threads(1), pytest.MonkeyPatch.context() as patch:
        assert backend.on_cpp(x)
        by_loops = [y.clone() for y in compute()]
        patch.setattr(backend, "library", lambda: None)
        assert not backend.on_cpp(x)
        return sum(map(count_unequal, by_loops, compute()))


@dtypes
@property_settings(25)
@given(T=st.integers(1, 70), D=st.integers(1, 5000), scale=SCALES, seed=st.integers(0, 99))
def test_rms_norm(dtype, T, D, scale, seed):
    x, residual = (randn(seed + i, T, D, dtype=dtype, scale=scale) for i in (0, 1))
    w, lengths = randn(seed + 2, D, dtype=dtype), [T // 3, T - T // 3]
    in_pass = Pass(token_blocks(lengths))
    assert unequal(lambda: with_gradients(lambda x, w: rms_norm(x, w, 1e-6, in_pass), x, w), x) == 0
    added = lambda x, r, w: add_rms_norm(x, r, w, 1e-6, in_pass)  # noqa: E731
    assert unequal(lambda: with_gradients(added, x, residual, w), x) == 0
    every_second, columns = randn(seed, 2 * T, D, dtype=dtype)[::2], randn(seed, D, T, dtype=dtype).t()
    w_apart = randn(seed, 2 * D, dtype=dtype)[::2]
    pairs = [(y, v) for y in (every_second, columns) for v in (w, w_apart)]
    assert unequal(lambda: [rms_norm(y, v, 1e-6) for y, v in pairs], x) == 0


@dtypes
@property_settings(25)
@given(
    n=st.integers(1, 40),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 5),
    half=st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_qk_norm_and_rope(dtype, n, heads, kv_heads, half, seed):
    total, D = heads + kv_heads, 2 * half
    x = randn(seed, n, total + kv_heads, D, dtype=dtype)[:, :total]  # tokens lie apart, as in a layer
    wq, wk = (randn(seed + i, D, dtype=dtype) for i in (1, 2))
    norm = lambda x, wq, wk: qk_norm(x, wq, wk, heads, 1e-6)  # noqa: E731
    assert unequal(lambda: with_gradients(norm, x, wq, wk), x) == 0
    assert unequal(lambda: [norm(x, wq.repeat(2)[::2], torch.ones(1, dtype=dtype).expand(D))], x) == 0
    cos, sin = (randn(seed + i, n, half, dtype=dtype) for i in (3, 4))
    assert unequal(lambda: with_gradients(lambda x: rope(x, cos, sin), x), x) == 0


@dtypes
@property_settings(20)
@given(
    n=st.integers(1, 40),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([8, 16, 40, 64]),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_heads_to_cache(dtype, n, heads, kv_heads, half, normed, seed):
    D = 2 * half
    qkv = randn(seed, n, heads + 2 * kv_heads, D, dtype=dtype)
    norm = QKNormWeights(*(randn(seed + i, D, dtype=dtype) for i in (1, 2)), 1e-6) if normed else None
    cos, sin = (randn(seed + i, n, half) for i in (3, 4))
    places = torch.randperm(3 * n, generator=torch.Generator().manual_seed(seed))[:n]

    def compute() -> Tensors:
        pages = torch.ones((3 * n // KEY_TILE + 1) * kv_heads, 2, KEY_TILE, D, dtype=dtype)
        with torch.no_grad():
            slots = CacheSlots(pages, places // KEY_TILE, places % KEY_TILE)
            return heads_to_cache(qkv, norm, cos, sin, heads, slots), pages

    assert unequal(compute, qkv) == 0


@property_settings(25)
@given(
    T=st.integers(1, 40),
    V=st.integers(1, 5000),
    scale=st.sampled_from([1e-3, 3.0, 90.0]),
    seed=st.integers(0, 99),
)
def test_uniforms_and_draw(T, V, scale, seed):
    counter = torch.randint(0, 1 << 32, (4, T), generator=torch.Generator().manual_seed(seed))
    logits = randn(seed + 1, T, V, scale=scale)
    logits[:, ::3] = float("-inf")  # as filters leave them
    logits[:, -1] = 0.0

    def compute() -> Tensors:
        u = uniforms(counter, seed, Stream.SAMPLE)
        edges = torch.cat([torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64), u])[:T]
        at_edges = drawn_logprobs(logits, edges)
        return u, *drawn_logprobs(logits, u), *at_edges, *drawn_logprobs(logits, u, greedy=True)

    assert unequal(compute, logits) == 0


@dtypes
@property_settings(25)
@given(T=st.integers(1, 200), width=st.integers(1, 700), scale=SCALES, seed=st.integers(0, 99))
def test_silu_mul_and_gelu_mul(dtype, T, width, scale, seed):
    gu = randn(seed, T, 2 * width, dtype=dtype, scale=scale)
    assert unequal(lambda: with_gradients(silu_mul, gu), gu) == 0
    assert unequal(lambda: with_gradients(gelu_mul, gu), gu) == 0


@property_settings(25)
@given(lengths=LENGTHS, shards=st.integers(1, 3), N=st.integers(1, 200), seed=st.integers(0, 99))
def test_add_columns(lengths, shards, N, seed):
    blocks = token_blocks(lengths, sorted(i % shards for i in range(len(lengths))))
    dy = randn(seed, sum(lengths), N)

    def compute() -> Tensors:
        buffer = GradBuffer(randn(seed + 1, shards, N))
        add_columns(buffer, dy, blocks)
        return [buffer.sums]

    assert unequal(compute, dy) == 0


@dtypes
@property_settings(25)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=5),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    D=st.sampled_from([16, 32, 48, 64, 128]),
    scale=SCALES,
    chunk=st.sampled_from([0, 32, 64]),
    seed=st.integers(0, 99),
)
def test_attention(dtype, sequences, group, kv_heads, D, scale, chunk, seed):
    lengths, contexts = zip(*sequences, strict=True)
    plan = varlen_plan(lengths, group * kv_heads, kv_heads, contexts)
    q = randn(seed, sum(lengths), group * kv_heads, D, dtype=dtype)
    k, v = (randn(seed + i, sum(plan.lengths), kv_heads, D, dtype=dtype) for i in (1, 2))
    rule = AttentionRule(chunk)
    attend = lambda q, k, v: attention(q, k, v, plan, D**-0.5, rule) * scale  # noqa: E731
    assert unequal(lambda: with_gradients(attend, q, k, v), q) == 0


def test_a_long_sequence_is_cut_and_takes_little_memory(monkeypatch):
    monkeypatch.setattr(attention_cpp, "_SCORES", 1 << 12)
    plan = varlen_plan([300, 7, 150], 4, 2, [0, 90, 3])
    q, k, v = randn(0, 457, 4, 32), *randn(1, 2, 550, 2, 32)
    with threads(1), torch.no_grad():
        assert unequal(lambda: [attention(q, k, v, plan, 0.2, r) for r in (WALK, AttentionRule(64))], q) == 0
        parts = plan.for_cpp[attention_cpp._forward_plan, 32].parts
    assert len(parts) > 40
    assert max(elements for *_, elements in parts) <= 1 << 12


def test_the_constants_are_those_of_the_references():
    text = "".join(f.read_text() for f in cpp.SOURCES.iterdir() if f.suffix in (".h", ".cpp"))
    constants = dict(re.findall(r"(KEY_TILE|QUERY_CHUNK|ALIGN) = (\d+)", text))
    ours = attention_ref.KEY_TILE, attention_ref.QUERY_CHUNK, attention_ref.ALIGN
    assert tuple(int(constants[name]) for name in ("KEY_TILE", "QUERY_CHUNK", "ALIGN")) == ours


@dtypes
@property_settings(25)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 99)), min_size=1, max_size=6),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    D=st.sampled_from([16, 32, 80, 128]),
    seed=st.integers(0, 99),
)
def test_attention_to_a_cache(dtype, sequences, group, kv_heads, D, seed):
    lengths, contexts = zip(*sequences, strict=True)
    pages = -(-max(map(sum, sequences)) // KEY_TILE)
    ids = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(seed))
    plan = AttentionPlan(lengths, contexts, ids.view(-1, pages).numpy(), group * kv_heads, kv_heads)
    q = randn(seed, sum(lengths), group * kv_heads, D, dtype=dtype)
    tiles = randn(seed + 1, len(ids) * kv_heads, 2, KEY_TILE, D, dtype=dtype)
    apart = tiles.repeat_interleave(2, dim=0)[::2]
    narrow = tiles.bfloat16()
    compute = lambda: [attention_cached(q, x, plan, 0.2) for x in (tiles, apart, narrow)]  # noqa: E731
    assert unequal(compute, q) == 0


@property_settings(25)
@given(
    T=st.integers(1, 400), N=WIDTHS, K=WIDTHS, transposed=st.booleans(), scale=SCALES, seed=st.integers(0, 99)
)
def test_matmul(T, N, K, transposed, scale, seed):
    x = randn(seed, T, K, scale=scale)
    w = randn(seed + 1, K, N).t() if transposed else randn(seed + 1, N, K)
    assert unequal(lambda: [matmul(x, w), matmul(x, w, pack_weights([w]).get(w))], x) == 0


def of_table(table: list[list[int]]) -> AttentionPlan:
    return AttentionPlan([1, 1], [40, 3], np.array(table), 4, 2)


Q, TILES, HEADS = randn(0, 2, 4, 32), randn(1, 8, 2, KEY_TILE, 32), randn(2, 3, 6, 32)
COS, PAGES, PLACES = randn(3, 3, 16), torch.zeros(4, 2, KEY_TILE, 32), torch.arange(3)


@pytest.mark.parametrize(
    "op",
    [
        lambda: attention_cached(Q, TILES, of_table([[0], [1]]), 0.1),
        lambda: attention_cached(Q, TILES, of_table([[0, 10**6], [1, 1]]), 0.1),
        lambda: attention_cached(Q, TILES, of_table([[0, -9], [1, 1]]), 0.1),
        lambda: attention_cached(Q[:1], TILES, of_table([[0, 2], [1, 1]]), 0.1),
        lambda: attention_cached(Q[:, :2], TILES, of_table([[0, 2], [1, 1]]), 0.1),
        lambda: heads_to_cache(HEADS, None, COS, COS, 2, CacheSlots(PAGES, PLACES + 10**6, PLACES)),
        lambda: heads_to_cache(HEADS, None, COS, COS, 2, CacheSlots(PAGES, PLACES - 9, PLACES)),
        lambda: heads_to_cache(HEADS, None, COS, COS, 2, CacheSlots(PAGES, PLACES[:2], PLACES)),
        lambda: heads_to_cache(HEADS, None, COS[:2], COS[:2], 2, CacheSlots(PAGES, PLACES, PLACES)),
        lambda: matmul(Q[:, 0], TILES[0, 0].bfloat16()),
        lambda: matmul(Q[:, 0, :16], TILES[0, 0]),
        lambda: matmul(Q[:, 0, :16], TILES[0, 0], pack_weights([TILES[0, 0]]).get(TILES[0, 0])),
        lambda: matmul(Q[:, 0, :0], TILES[0, 0, :, :0]),
        lambda: add_columns(GradBuffer(torch.zeros(1, 32)), Q[:, 0], token_blocks([5])),
        lambda: uniforms(torch.zeros(4, 3, dtype=torch.int64), -1, Stream.SAMPLE),
        lambda: uniforms(torch.zeros(5, 3, dtype=torch.int64), 1, Stream.SAMPLE),
    ],
)
def test_what_does_not_fit_is_refused_as_without_the_loops(op, monkeypatch):
    with threads(1), torch.no_grad():
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            op()
        monkeypatch.setattr(backend, "library", lambda: None)
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            op()


def test_what_is_not_finite_stays_so():
    """The references' NaN may have another sign, so their places are compared."""
    x, w = randn(0, 40, 64), randn(1, 64)
    x[3, 5], x[7, 60] = float("nan"), float("inf")
    plan = varlen_plan([30, 10], 2, 1)
    q, k, v = x.view(-1, 2, 32), randn(2, 40, 1, 32), randn(3, 40, 1, 32)
    computed = [
        lambda: rms_norm(x, w, 1e-6),
        lambda: silu_mul(x),
        lambda: attention(q, k, v, plan, 0.1),
        lambda: matmul(x, randn(2, 16, 64)),
        lambda: drawn_logprobs(x, torch.full((40,), 0.3, dtype=torch.float64))[1],
    ]
    places = lambda: [compute().isfinite().float() for compute in computed]  # noqa: E731
    assert unequal(places, x) == 0
    with threads(1):
        assert all(0 < (y == 0).sum() < y.numel() for y in places())
        if attention_cpp.forward_agrees(2, 1, 32, WALK):
            v[20] = float("nan")  # what comes later reaches nobody; in the reference it reaches its key tile
            assert attention(randn(0, 40, 2, 32), k, v, plan, 0.1)[:20].isfinite().all()


def test_control_another_order_is_not_taken(monkeypatch):
    """Where a library sums otherwise, the probes say so, and the references run."""
    x, w = randn(0, 40, 272), randn(1, 32, 272)
    q, k, v = (randn(i, 70, 2, 32) for i in (2, 3, 4))
    plan = varlen_plan([70], 2, 2)
    probes = row_sums.sum_lanes, matmul_module._cpp_agrees, attention_cpp._forward_agrees
    with threads(1), forgotten(probes[0]), forgotten(probes[1]), forgotten(probes[2]):
        monkeypatch.setattr(row_sums, "_LANES", (5,))  # row_sum.h takes 4 for it, and here torch has more
        monkeypatch.setattr(matmul_module, "_linear", lambda x, w: torch.mm(x.flip(1), w.flip(1).t()))
        monkeypatch.setattr(matmul_module, "_mm_agrees", lambda *_: False)
        for module in (attention_module, attention_cpp):
            monkeypatch.setattr(module, "attention_ref", flipped(attention_ref.attention_ref))
        assert row_sums.sum_lanes(272) == 0
        assert not matmul_module._cpp_agrees(32, 272, w.stride())
        assert not attention_cpp.forward_agrees(2, 2, 32, WALK)
        expected = (
            matmul_module.matmul_ref(x, w),
            attention_module._packed(q, k, v, plan, 0.3, WALK, False)[0],
        )
        assert sum(map(count_unequal, (matmul(x, w), attention(q, k, v, plan, 0.3)), expected)) == 0
        assert count_unequal(matmul_module.matmul_cpp.product(x, w), expected[0]) > 0, "control"
        assert count_unequal(attention_cpp.attention_fwd(q, k, v, plan, 0.3, WALK, False)[0], expected[1]) > 0


def flipped(attention_ref: Callable) -> Callable:
    """The reference with the width of a head in descending order."""

    def compute(q, tiles, *args, **kwargs):
        o, lse = attention_ref(q.flip(-1), tiles.flip(-1), *args, **kwargs)
        return o.flip(-1), lse

    return compute


def test_several_threads_share_the_references():
    x = randn(0, 4, 16)
    with threads(1):
        assert backend.on_cpp(x)
        assert not backend.on_cpp(x.double())
        assert not backend.on_cpp(x.half())
    with threads(2):
        assert not backend.on_cpp(x)


def test_they_do_not_care_about_torchs_default_dtype():
    x, w = randn(0, 40, 64), randn(1, 64)

    def compute() -> Tensors:
        u = torch.full((40,), 0.3, dtype=torch.float64)
        return rms_norm(x, w, 1e-6), silu_mul(x), matmul(x, x), *drawn_logprobs(x, u)

    with threads(1):
        expected = compute()
        torch.set_default_dtype(torch.float64)
        try:
            assert sum(map(count_unequal, compute(), expected)) == 0
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("target", ["x86-64-v3", "skylake-avx512", "sapphirerapids"])
def test_they_compile_for(target, tmp_path):
    # Without optimisation: that a target has the instructions is checked all the same.
    other = {"-march=native": "-march=" + target, "-O3": "-O0"}
    flags = [other.get(flag, flag) for flag in cpp._FLAGS]
    files = map(str, cpp.SOURCES.glob("*.cpp"))
    command = ["c++", *flags, "-Wall", "-Wextra", *files, "-o", str(tmp_path / "loops.so")]
    subprocess.run(command, capture_output=True, check=True)


_LOADED = "from zerokl.kernels.cpp import library; print(library() is not None)"


def loaded(**environment: str) -> bool:
    """Whether another process with this environment has the loops."""
    command = [sys.executable, "-c", _LOADED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return result.stdout == "True\n"


@pytest.mark.full
def test_without_a_compiler_a_cache_or_its_consent_the_references_run(tmp_path):
    path = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not loaded(**path)
    (tmp_path / "c++").symlink_to("/bin/false")
    assert not loaded(**path)
    (tmp_path / "c++").unlink()
    (tmp_path / "file").touch()
    with_compiler = {"PATH": f"{shutil.which('c++').rpartition('/')[0]}:/usr/bin:/bin"}
    assert not loaded(**with_compiler, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert not loaded(**with_compiler, XDG_CACHE_HOME=str(tmp_path / "off"), ZEROKL_CPP="0")
    assert not (tmp_path / "off").exists()
    assert loaded(**with_compiler, XDG_CACHE_HOME=str(tmp_path / "cache"))
    compiled, lock = sorted((tmp_path / "cache" / "zerokl").iterdir(), key=lambda f: f.suffix, reverse=True)
    assert (compiled.suffix, lock.suffix) == (".so", ".lock")
    compiled.write_bytes(b"")  # as after a crash of the machine
    assert not loaded(**with_compiler, XDG_CACHE_HOME=str(tmp_path / "cache"))


@pytest.mark.full
def test_a_compiler_that_fails_is_asked_once_and_its_words_are_kept(tmp_path):
    fails = tmp_path / "c++"
    fails.write_text(
        f'#!/bin/sh\ncase "$*" in *-dM*) exec {shutil.which("c++")} "$@";; esac\necho no room >&2; exit 1\n'
    )
    fails.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not loaded(**environment)
    (words,) = (tmp_path / "cache" / "zerokl").glob("*.log")
    assert words.read_text() == "no room\n"
    words.write_text("kept")
    assert not loaded(**environment)
    assert words.read_text() == "kept"
