"""Every family in bf16, and one in fp16: `vllm-zerokl` gives the fingerprint of the native sampler."""

import pytest
from zerokl.engine.runs.run import train
from zerokl.model.families import MODEL_TYPES

from tests.engine.conftest import _toy_module, config, model
from tests.engine.runs.exact_runs import train_exactly
from tests.helpers import fingerprint
from tests.model.test_mxfp4 import quantise_experts
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.vllm

__all__ = ["_toy_module", "config", "model"]

# Those whose blocks differ most; all others in `make test-vllm` without --quick.
QUICK = ("olmo2", "glm4_moe")
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            (x, "bfloat16") if x in QUICK else pytest.param(x, "bfloat16", marks=FULL)
            for x in sorted(MODEL_TYPES)
        ),
        pytest.param("gpt_oss", "float16", marks=FULL),
    ],
)
def test_a_familys_fingerprint_is_that_of_the_native_sampler(config, family, dtype, tmp_path):
    widths = TWO_LAYERS | {"model_type": family} | dict(MODEL_TYPES[family].small)
    folder = random_model(tmp_path, widths, 1.5)
    if "full_attention_interval" in MODEL_TYPES[family].small:
        with pytest.raises(ValueError, match="no place for the states"):
            train(config(model=folder, dtype=dtype, sampler="vllm-zerokl"), tmp_path / "refused")
        return
    if "kv_lora_rank" in MODEL_TYPES[family].small:
        with pytest.raises(ValueError, match="plans a cache of latents"):
            train(config(model=folder, dtype=dtype, sampler="vllm-zerokl"), tmp_path / "refused")
        return
    ends = []
    for sampler in ("native", "vllm-zerokl"):
        summary = train_exactly(config(model=folder, dtype=dtype, sampler=sampler), tmp_path / sampler)
        ends.append((fingerprint(tmp_path / sampler), summary.weights))
    assert ends[0] == ends[1]


@pytest.mark.full
def test_weights_in_mxfp4_are_given_to_vllm_as_numbers(config, tmp_path):
    widths = TWO_LAYERS | {"model_type": "gpt_oss"} | dict(MODEL_TYPES["gpt_oss"].small)
    plain, quantised = random_model(tmp_path, widths, 1.5), tmp_path / "quantised"
    quantise_experts(plain, quantised)
    for folder, sampler in ((plain, "native"), (quantised, "vllm-zerokl")):
        train(config(model=folder, dtype="bfloat16", sampler=sampler), tmp_path / sampler)
    assert fingerprint(tmp_path / "vllm-zerokl") == fingerprint(tmp_path / "native")
