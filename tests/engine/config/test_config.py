"""The configuration: every key is checked, and a configuration that is written is read back equal."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.cli import main
from zerokl.engine.config.config_file import known_keys, load_config, preset_names, to_toml
from zerokl.engine.config.key_hints import OTHER_NAMES
from zerokl.engine.config.loss_section import Bound, Correction
from zerokl.engine.config.precision_section import SHORT_DTYPES
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.section import settings_of
from zerokl.engine.tasks.loading import load_task
from zerokl.engine.train.losses.corrections import CORRECTIONS
from zerokl.engine.train.losses.surrogates import BOUNDS
from zerokl.kernels.sampling_params import PENALTIES

OPTION = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def _read(tmp_path_factory, text: str) -> Config:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return load_config(str(path), None, {})


@given(
    options=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), OPTION, max_size=4),
    lr=st.one_of(st.just(0.0), st.floats(1e-37, 1)),
    model=st.text("aé/.\"\\'#\n😀"),
    logit_bias=st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100, width=32), max_size=3),
    allowed=st.none() | st.sets(st.integers(0, 200_000), min_size=1, max_size=3),
)
def test_toml_round_trip(tmp_path_factory, options, lr, model, logit_bias, allowed):
    values = {"model": model, "task": {"options": options}, "optimizer": {"lr": lr}}
    config = Config.model_validate(
        values | {"sampling": {"logit_bias": logit_bias, "allowed_token_ids": allowed}}
    )
    assert _read(tmp_path_factory, to_toml(config)) == config


@pytest.mark.parametrize("options", [{"inner": {"a": 1}}, {"a.b": 1}, {"a b": 1}, {"list": [{"a": 1}]}])
def test_toml_round_trip_of_unusual_options(tmp_path_factory, options):
    config = Config.model_validate({"task": {"options": options}})
    assert _read(tmp_path_factory, to_toml(config)).task.options == options


@pytest.mark.parametrize("preset", preset_names())
def test_presets_are_valid(preset):
    assert load_config(None, preset, {}).steps >= 1


def test_every_field_has_its_line_of_meaning():
    """`zerokl train --help` and docs/configuration.md show the line under a field."""

    for key, setting in settings_of(Config).items():
        assert (setting.field.description or "").endswith("."), key


def test_another_name_of_a_setting_is_refused_with_ours():
    keys = set(known_keys()) | {"--run_dir", "--resume"}
    for other, meant in OTHER_NAMES.items():
        assert meant in keys
        for key in {other, f"optimizer.{other}"} - keys:
            with pytest.raises(ValueError, match=f"^config: unknown key {key}; did you mean {meant}\\?$"):
                load_config(None, None, {key: 1})


def test_a_value_for_a_section_is_refused_with_the_key_that_was_meant():
    with pytest.raises(ValueError, match=r"^config: loss \('grpo'\) is a section; did you mean loss.preset"):
        load_config(None, None, {"loss": "grpo"})
    with pytest.raises(ValueError, match=r"^config: optimizer \('muon'\) is .*; did you mean optimizer.name"):
        load_config(None, None, {"optimizer": "muon"})
    message = r"^config: checkpoint \(1\) is a section; its settings are checkpoint.every"
    with pytest.raises(ValueError, match=message):
        load_config(None, None, {"checkpoint": 1})


@pytest.mark.parametrize(("short", "full"), SHORT_DTYPES.items())
def test_the_short_name_of_a_dtype_is_kept_as_the_full_one(short, full):
    assert load_config(None, None, {"dtype": short}) == load_config(None, None, {"dtype": full})
    config = load_config(None, None, {"exact": False, "precision.sampler_dtype": short})
    assert config.precision.sampler_dtype == full


def test_what_the_loss_may_be_is_what_the_registries_hold():
    assert set(get_args(Bound)) == set(BOUNDS)
    assert set(get_args(Correction)) == set(CORRECTIONS)


def test_overrides_win_over_the_file(tmp_path):
    (tmp_path / "c.toml").write_text("steps = 7\n[optimizer]\nlr = 0.5\nbeta1 = 0.5\n")
    overrides = {"optimizer.lr": "3e-4", "exact": "false", "model": "7"}
    config = load_config(str(tmp_path / "c.toml"), None, overrides)
    assert (config.steps, config.optimizer.lr, config.optimizer.beta1) == (7, 3e-4, 0.5)
    assert (config.exact, config.model) == (False, "7")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("stepz", "steps"),
        ("num_generation", "num_generations"),
        ("optimizer.lrr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("temperature", "sampling.temperature"),
        ("sampling.temprature", "sampling.temperature"),
        ("max_tokens", "sampling.max_tokens"),
        ("loss.clip_hi", "loss.clip_high"),
        ("native.max_concurency", "native.max_concurrency"),
        ("task.optoins", "task.options"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, key, nearest):
    with pytest.raises(ValueError, match=f"unknown key {key}; did you mean {nearest}\\?"):
        load_config(None, None, {key: "1"})
    (tmp_path / "c.toml").write_text(f"{key} = 1\n")
    with pytest.raises(ValueError, match=f"unknown key .*did you mean {nearest.split('.')[0]}"):
        load_config(str(tmp_path / "c.toml"), None, {})


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_refused_with_the_reason_wherever_it_is_written(tmp_path, penalty, capsys):
    """A penalty that is off in vLLM is refused too: the configuration has no such key."""
    reason = "the trainer scores all tokens of a sequence at once"
    (tmp_path / "c.toml").write_text(f"[sampling]\n{penalty} = 1.1\n")
    with pytest.raises(ValueError, match=f"config: sampling.{penalty} is refused: .*{reason}"):
        load_config(str(tmp_path / "c.toml"))
    for key in (penalty, f"sampling.{penalty}", f"optimizer.{penalty}"):
        with pytest.raises(ValueError, match=f"config: {key} is refused: .*{reason}"):
            load_config(None, None, {key: PENALTIES[penalty]})
    with pytest.raises(ValueError, match=f"{penalty} \\(1.1\\) is refused: .*{reason}"):
        Config.model_validate({"sampling": {penalty: 1.1}})
    assert main(["train", "--run_dir", str(tmp_path / "run"), f"--sampling.{penalty}", "1.1"]) == 2
    error = capsys.readouterr().err
    assert f"sampling.{penalty} is refused" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("min_p", 0.1), ("logit_bias", {"3": 1.0}), ("allowed_token_ids", [3])]
)
def test_a_filter_that_transformers_has_otherwise_is_refused_with_its_sampler(key, value):
    overrides = {"exact": False, f"sampling.{key}": value}
    assert load_config(None, None, overrides | {"sampler": "vllm"}).sampler == "vllm"
    with pytest.raises(ValueError, match=r'sampler \("hf"\) with sampling.min_p, logit_bias or allowed'):
        load_config(None, None, overrides | {"sampler": "hf"})


@pytest.mark.parametrize("sampler", ["hf", "vllm", "vllm-exact", "vllm-zerokl"])
def test_guessed_tokens_are_refused_with_other_samplers(sampler):
    overrides = {"native.speculate": 4}
    assert load_config(None, None, overrides).native.speculate == 4
    with pytest.raises(
        ValueError, match=rf'native.speculate \(4\) with sampler \("{sampler}"\): .* by chance'
    ):
        load_config(None, None, overrides | {"sampler": sampler, "exact": sampler.startswith("vllm-")})


def test_a_number_of_another_schedule_is_refused():
    overrides = {"optimizer.cycles": 3}
    load_config(None, None, overrides | {"optimizer.schedule": "cosine_with_restarts"})
    with pytest.raises(ValueError, match=r'optimizer.cycles \(3\) is of schedule = "cosine_with_restarts"'):
        load_config(None, None, overrides | {"optimizer.schedule": "cosine"})


def test_every_key_mistyped_by_one_letter_is_refused():
    for key in known_keys():
        with pytest.raises(ValueError, match=f"unknown key {key}q"):
            load_config(None, None, {f"{key}q": "1"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", "many"),
        ("steps", "0"),
        ("steps", "1.5"),
        ("steps", ""),
        ("exact", "perhaps"),
        ("dtype", "float8"),
        ("seed", "-1"),
        ("seed", str(2**32)),
        ("virtual_shards", "3"),
        ("num_generations", "1"),
        ("sampling.temperature", "0"),
        ("sampling.temperature", "nan"),
        ("sampling.top_p", "0"),
        ("sampling.top_p", "1.1"),
        ("sampling.top_k", "-1"),
        ("sampling.min_p", "1.1"),
        ("sampling.min_p", "nan"),
        ("sampling.logit_bias", {"17": 100.5}),
        ("sampling.logit_bias", {"17": "nan"}),
        ("sampling.logit_bias", {"-1": 1.0}),
        ("sampling.logit_bias", {"+": 1.0}),
        ("sampling.logit_bias", {"17": 1.0, "017": 2.0}),
        ("sampling.logit_bias", {"17": 1.0, 17: 2.0}),
        ("sampling.logit_bias", {"9" * 5000: 1.0}),
        ("sampling.logit_bias", "17"),
        ("sampling.allowed_token_ids", []),
        ("sampling.allowed_token_ids", [3, -1]),
        ("sampling.allowed_token_ids", [3.5]),
        ("sampling.allowed_token_ids", 3),
        ("optimizer.lr", "inf"),
        ("loss.preset", "trpo"),
        ("loss.clip_low", "2"),
        ("sampler", "magic"),
        ("sampling", "3"),
        ("task", "add"),
        ("task.options", "max"),
    ],
)
def test_a_bad_value_is_refused_by_key(key, value):
    with pytest.raises(ValueError, match=key.split(".")[-1]) as caught:
        load_config(None, None, {key: value})
    assert str(caught.value).startswith("config: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("task = 'add'\n", "task.name"),
        ("sampling = 3\n", "sampling.top_k"),
        ("task = 'add'\n", "task.options.x"),
    ],
)
def test_an_override_inside_what_is_no_section_is_refused(tmp_path, file, key):
    (tmp_path / "c.toml").write_text(file)
    with pytest.raises(ValueError, match="config: "):
        load_config(str(tmp_path / "c.toml"), None, {key: "1"})


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("x = = 1")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for file, message in (
        ("none.toml", "cannot be read"),
        ("bad.toml", "is not valid TOML"),
        ("binary.toml", "is not UTF-8"),
        (".", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(str(tmp_path / file), None, {})
    with pytest.raises(ValueError, match="not both"):
        load_config("a.toml", "demo", {})
    with pytest.raises(ValueError, match=r"preset dem is not known; choose .*demo"):
        load_config(None, "dem", {})


@pytest.mark.parametrize("as_file", [False, True])
def test_another_task_leaves_the_options_of_the_first_behind(tmp_path, as_file):
    (tmp_path / "c.toml").write_text(to_toml(load_config(None, "demo")))
    source = (str(tmp_path / "c.toml"), None) if as_file else (None, "demo")
    assert load_config(*source).task.options["max_value"] == 99
    assert load_config(*source, {"task.name": "add"}).task.options["max_value"] == 99
    assert load_config(*source, {"task.name": "sort"}).task.options == {}
    given = {"task.options.train": 20, "task.name": "sort"}
    for order in (given, dict(reversed(given.items()))):
        config = load_config(*source, order)
        assert config.task.options == {"train": 20}
        assert load_task(config.task.name, config.task.options).problems("train")[19].id == 19


def test_the_options_of_a_file_without_a_task_are_those_of_the_task_that_is_given(tmp_path):
    (tmp_path / "c.toml").write_text("[task.options]\ntrain = 20\n")
    assert load_config(str(tmp_path / "c.toml"), None, {"task.name": "sort"}).task.options == {"train": 20}


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "hf", "exact": False},
        {"max_staleness": 1},
        {"precision.sampler_dtype": "bfloat16", "exact": False},
        {"workers": 2},
        {"shards_in_flight": 2},
    ],
    ids=str,
)
def test_what_sharded_weights_do_not_go_with_is_refused_by_name(settings):
    load_config(None, None, settings)
    with pytest.raises(ValueError, match=r'config: parallel.engine \("fsdp"\) with ') as caught:
        load_config(None, None, settings | {"parallel.engine": "fsdp"})
    names = {"precision.sampler_dtype": "sampler_"}
    key = next(iter(settings))
    assert names.get(key, key.split(".")[-1]) in str(caught.value)
    assert "\n" not in str(caught.value)
