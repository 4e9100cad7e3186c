"""The manifests for KubeRay: valid, with storage everywhere, and with what the job asks for."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.kustomize import Objects, build

from polytrain import ScalingConfig
from polytrain.view.cli.job_file import arguments_of, job_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
KUBERAY = DEPLOY / "kuberay"
OVERLAYS = sorted(path.name for path in (KUBERAY / "overlays").iterdir())
SCHEMA = json.loads((Path(__file__).parent / "schemas/kuberay-1.7.0.json").read_text())
KUBERNETES = "1.33"
"""The version of Kubernetes whose core objects are checked against."""

RAY_JOBS = ("RayJob", "RayCluster")


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Objects:
    return build(KUBERAY / "overlays" / request.param)


def ray_of(objects: Objects) -> dict[str, Any]:
    """The RayJob, or the RayCluster, of an overlay."""
    (found,) = (each for each in objects if each["kind"] in RAY_JOBS)
    return found


def cluster_of(objects: Objects) -> dict[str, Any]:
    ray = ray_of(objects)
    return ray["spec"]["rayClusterSpec"] if ray["kind"] == "RayJob" else ray["spec"]


def pods_of(objects: Objects) -> Iterator[dict[str, Any]]:
    """The templates of head, workers and, for a job, of the pod that submits it."""
    cluster, ray = cluster_of(objects), ray_of(objects)
    yield cluster["headGroupSpec"]["template"]
    yield from (group["template"] for group in cluster["workerGroupSpecs"])
    if ray["kind"] == "RayJob":
        yield ray["spec"]["submitterPodTemplate"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return found


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(pod).get("env", ())}


def as_core_object(pod: dict[str, Any]) -> dict[str, Any]:
    metadata = {**pod["metadata"], "name": "pod"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl is installed")
def test_kustomize_makes_of_it_what_these_tests_look_at(name: str) -> None:
    directory = KUBERAY / "overlays" / name
    real = subprocess.run(
        ["kubectl", "kustomize", directory], capture_output=True, text=True, check=True
    ).stdout

    def by_kind(each: dict[str, Any]) -> str:
        return str(each["kind"])

    assert sorted(yaml.safe_load_all(real), key=by_kind) == sorted(build(directory), key=by_kind)


def validate(ray: dict[str, Any]) -> None:
    jsonschema.validate(ray, {**SCHEMA, "$ref": f"#/$defs/{ray['kind']}"})


def test_it_is_valid(overlay: Objects) -> None:
    validate(ray_of(overlay))
    for each in overlay:
        if each["kind"] not in RAY_JOBS:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    for pod in pods_of(overlay):
        kubernetes_validate.validate(as_core_object(pod), KUBERNETES, strict=True)


def test_a_misspelt_field_is_not_valid() -> None:
    objects = build(KUBERAY / "overlays/s3")
    ray_of(objects)["spec"]["backofLimit"] = 3
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        validate(ray_of(objects))
    pod = as_core_object(next(pods_of(objects)))
    pod["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_volume_is_valid_and_in_no_overlay(overlay: Objects) -> None:
    claim = yaml.safe_load((KUBERAY / "components/shared-volume/volume.yaml").read_text())
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # `kubectl delete -k` would delete the runs, too.
    assert "PersistentVolumeClaim" not in {each["kind"] for each in overlay}


def storage_of(pod: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The claims that a pod mounts, with the places, and the Secrets in its environment."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = container(pod)["volumeMounts"]
    mounted = [(claims[m["name"]], m["mountPath"]) for m in mounts if m["name"] in claims]
    return mounted, container(pod)["envFrom"]


def test_head_and_workers_reach_the_same_storage(overlay: Objects) -> None:
    cluster = cluster_of(overlay)
    head = cluster["headGroupSpec"]["template"]
    mounted, secrets = storage_of(head)
    storage = environment(head)["STORAGE"]
    assert secrets if storage.startswith("s3://") else storage in [place for _, place in mounted]
    for group in cluster["workerGroupSpecs"]:
        assert storage_of(group["template"]) == (mounted, secrets)


def command_of(objects: Objects, directory: Path) -> list[str]:
    """What the job starts in the head: the entrypoint's way there, with stand-ins for commands."""
    entrypoint = ray_of(build(KUBERAY / "overlays/s3"))["spec"]["entrypoint"]
    for name in ("ray", "polytrain"):
        command = directory / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" > {directory}/{name}.arguments\n")
        command.chmod(0o755)
    path = f"{directory / 'bin'}:{os.environ['PATH']}"

    # The pod that submits, and what `ray job submit` (dashboard/modules/job/cli.py) makes of it.
    submitting = f"ray job submit --no-wait -- {entrypoint} ;"
    subprocess.run(["bash", "-ce", "--", submitting], env={"PATH": path}, check=True)
    words = (directory / "ray.arguments").read_text().splitlines()
    submitted = shlex.join(words[words.index("--") + 1 :])

    # The head: Ray runs it in a shell.
    variables = environment(cluster_of(objects)["headGroupSpec"]["template"])
    subprocess.run(
        submitted.replace("/job ", f"{directory} "),
        shell=True,
        env={"PATH": path, **variables},
        check=True,
    )
    return (directory / "polytrain.arguments").read_text().splitlines()


def scaling_of(objects: Objects, directory: Path) -> ScalingConfig:
    """What the job's command asks for."""
    words = command_of(objects, directory)
    assert words[:2] == ["run", "job.toml"]
    assert set(words[2::2]) == {"--set"}
    job = job_of((DEPLOY / "job.toml").read_text(), words[3::2])
    head = cluster_of(objects)["headGroupSpec"]["template"]
    assert job["run_config"]["storage_path"] == environment(head)["STORAGE"]
    del job["datasets"], job["train_loop_per_worker"]
    scaling: ScalingConfig = arguments_of(job)["scaling_config"]
    return scaling


def test_the_pods_hold_what_the_job_asks_for(overlay: Objects, tmp_path: Path) -> None:
    scaling = scaling_of(overlay, tmp_path)
    (group,) = cluster_of(overlay)["workerGroupSpecs"]
    limits = container(group["template"])["resources"]["limits"]
    assert scaling.resources_per_worker is not None
    # One worker in each pod, with all of it.
    assert float(limits["cpu"]) == scaling.resources_per_worker["CPU"]
    assert int(limits.get("nvidia.com/gpu", 0)) == int(scaling.use_gpu)
    workers = scaling.num_workers
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    assert (least, most) == (group["minReplicas"], group["maxReplicas"])
    assert least <= group["replicas"] <= most


def test_only_an_elastic_run_has_an_autoscaler_and_none_has_it_under_kueue(tmp_path: Path) -> None:
    for name in OVERLAYS:
        objects = build(KUBERAY / "overlays" / name)
        elastic = isinstance(scaling_of(objects, tmp_path).num_workers, tuple)
        assert cluster_of(objects).get("enableInTreeAutoscaling", False) == elastic
        queued = "kueue.x-k8s.io/queue-name" in ray_of(objects)["metadata"].get("labels", {})
        assert not (queued and elastic)
        # The autoscaler, and nobody else, talks to Kubernetes.
        head, *others = pods_of(objects)
        assert head["spec"]["automountServiceAccountToken"] == elastic
        assert not any(pod["spec"]["automountServiceAccountToken"] for pod in others)
    assert ray_of(build(KUBERAY / "overlays/kueue"))["spec"]["suspend"] is True


def test_every_pod_is_the_users_own_and_reached_by_its_own(overlay: Objects) -> None:
    (policy,) = (each for each in overlay if each["kind"] == "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": own}}]}
    for pod in pods_of(overlay):
        assert own.items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container(pod)["securityContext"]["allowPrivilegeEscalation"] is False
        assert container(pod)["image"] == "registry.example.com/polytrain:1"
    assert cluster_of(overlay)["authOptions"] == {"mode": "token"}


def test_there_is_time_for_the_checkpoint_that_is_made_before_a_pod_goes(overlay: Objects) -> None:
    head, worker, *_ = pods_of(overlay)
    job = job_of((DEPLOY / "job.toml").read_text())
    run = f"$STORAGE/{job['run_config']['name']}"
    assert container(head)["lifecycle"]["preStop"]["exec"]["command"][2].split()[:3] == [
        *("polytrain", "stop", run),
    ]
    grace = head["spec"]["terminationGracePeriodSeconds"]
    assert int(environment(head)["RAY_JOB_STOP_WAIT_TIME_S"]) < grace
    assert container(worker)["lifecycle"]["preStop"]["exec"]["command"] == ["leave-node"]
    within = int(environment(worker)["LEAVE_WITHIN_S"])
    assert within < worker["spec"]["terminationGracePeriodSeconds"]


def test_the_cluster_is_of_the_version_that_is_in_the_image(overlay: Objects) -> None:
    pins = (ROOT / ".ci/constraints-py311.txt").read_text()
    assert f"\nray=={cluster_of(overlay)['rayVersion']}\n" in pins
