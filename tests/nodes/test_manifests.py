"""The files of docs/examples/nodes, each by the validator of what reads it."""

import copy
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nodes

NODES = Path(__file__).parents[2] / "docs" / "examples" / "nodes"


def _objects() -> list[dict]:
    import yaml

    return list(yaml.safe_load_all((NODES / "pytorchjob.yaml").read_text()))


def _through_the_operator(job: dict) -> dict:
    """What the training operator's own classes keep of a job. Raises ValueError for what they need."""
    from kubeflow.training import models
    from kubeflow.training.api_client import ApiClient

    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(job)), models.KubeflowOrgV1PyTorchJob)
    return client.sanitize_for_serialization(read)


def test_kubernetes_knows_the_rendezvous():
    import kubernetes_validate

    service, deployment, _ = _objects()
    for known in (service, deployment):
        kubernetes_validate.validate(known, kubernetes_validate.latest_version(), strict=True)
    planted = copy.deepcopy(deployment)
    planted["spec"]["template"]["spec"]["containers"][0]["cmd"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(planted, kubernetes_validate.latest_version(), strict=True)
    assert service["metadata"]["name"] == _objects()[2]["spec"]["elasticPolicy"]["rdzvHost"]


def test_the_training_operator_knows_the_job():
    job = _objects()[2]
    assert _through_the_operator(job) == job
    planted = copy.deepcopy(job)
    planted["spec"]["elasticPolicy"]["maxRestart"] = 1
    assert _through_the_operator(planted) != planted
    del planted["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="pytorch_replica_specs"):
        _through_the_operator(planted)


def test_skypilot_knows_the_task(tmp_path):
    import sky

    text = (NODES / "skypilot.yaml").read_text()
    task = sky.Task.from_yaml(str(NODES / "skypilot.yaml"))
    assert (task.num_nodes, task.name) == (2, "zerokl")
    _shellcheck(task.run, tmp_path)
    (tmp_path / "planted.yaml").write_text(text.replace("num_nodes", "nodes"))
    with pytest.raises(ValueError, match="nodes"):
        sky.Task.from_yaml(str(tmp_path / "planted.yaml"))


def test_the_shell_knows_the_batch_script(tmp_path):
    text = (NODES / "slurm.sbatch").read_text()
    _shellcheck(text, tmp_path)
    with pytest.raises(AssertionError, match="SC2086"):
        _shellcheck(text.replace('"$RUN"', "$RUN"), tmp_path)


def _shellcheck(script: str, folder: Path) -> None:
    (folder / "script.sh").write_text(script)
    process = subprocess.run(
        ["shellcheck", "--shell=bash", str(folder / "script.sh")], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout
