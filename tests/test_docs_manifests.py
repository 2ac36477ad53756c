"""The files of docs/manifests: Kubernetes' against its own API types, scripts by `bash -n`, and
what they set by the rules of jaxring.init()."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from jaxring._src import placement

MANIFESTS = Path(__file__).parent.parent / "docs" / "manifests"


def documents():
    return list(yaml.safe_load_all((MANIFESTS / "job.yaml").read_text()))


def by_kubernetes(document):
    """The document as Kubernetes' own API types have it: they drop fields that they don't know, and
    raise where one that is required is missing."""
    made = getattr(client, f"V1{document['kind']}").from_dict(document)
    return client.ApiClient().sanitize_for_serialization(made)


def test_kubernetes_knows_every_field():
    for document in documents():
        assert by_kubernetes(document) == document


def test_a_wrong_field_is_found():
    _, job = documents()
    job["spec"]["template"]["spec"]["container"] = []
    assert by_kubernetes(job) != job
    del job["spec"]["template"]["spec"]["containers"]
    with pytest.raises(ValueError, match="containers"):
        by_kubernetes(job)


def test_the_pods_find_each_other():
    service, job = documents()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    env = {e["name"]: e.get("value", "secret") for e in pod["containers"][0]["env"]}
    assert spec["completionMode"] == "Indexed"  # gives JOB_COMPLETION_INDEX
    assert spec["parallelism"] == spec["completions"] == int(env["JAXRING_WORLD_SIZE"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    given = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", **env}
    place = placement.discover(env=given)
    assert (place.rank, place.world_size, place.secret) == (3, 4, "secret")
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert place.coordinator is not None
    assert place.coordinator.rpartition(":")[0] == first


@pytest.mark.parametrize("name", ["slurm.sh", "openmpi.sh"])
def test_scripts(name):
    subprocess.run(["bash", "-n", MANIFESTS / name], check=True)


def test_slurm_options_are_what_init_reads():
    text = (MANIFESTS / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert "srun python" in text
    env = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": options["nodes"],
        "SLURM_STEP_NODELIST": "h[0-1]",
        "SLURM_JOB_ID": "12",
        "JAXRING_SECRET": "secret",
    }
    place = placement.discover(env=env)
    assert (place.rank, place.world_size, place.coordinator) == (5, 8, "h0:20012")
