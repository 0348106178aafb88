"""The public names of the package, and the example of its docstring."""

import subprocess
import sys

import pytest
import zerokl


@pytest.mark.parametrize("name", zerokl.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert callable(getattr(zerokl, name))
    assert getattr(zerokl, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = zerokl.trian


def test_neither_zerokl_nor_its_help_waits_for_torch():
    slow_to_import = ("torch", "transformers")
    code = "import zerokl, zerokl.cli; zerokl.cli.main(['train', '--help'])"
    check = f"import sys; {code}; sys.exit(any(m in sys.modules for m in {slow_to_import}))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.full
def test_the_example_of_the_package_runs(model_source, tmp_path, monkeypatch):
    """The lines of zerokl's docstring, with a small model and run."""
    monkeypatch.chdir(tmp_path)
    policy = zerokl.load_policy(str(model_source))
    rollouts = policy.sample(["12+7="], n=4)
    scores = policy.score([r.pair for r in rollouts])
    assert [s.tobytes() for s in scores] == [r.logprobs.tobytes() for r in rollouts]
    overrides = {"model": str(model_source), "steps": "1", "prompts": "2", "evaluation.every": "0"}
    summary = zerokl.train(zerokl.load_config(None, "demo", overrides), "runs/demo")
    assert summary.mismatch_max_abs == 0.0
    assert all(c.holds for c in zerokl.check_law(str(model_source), ["float32"], sequences=2, longest=20))
