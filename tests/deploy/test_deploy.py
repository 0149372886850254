"""The files in deploy: they can be read, and what they run are commands and options that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock import __version__
from penstock.cli.app import COMMANDS, command
from penstock.cli.framework.command import make_parser
from tests.deploy.charts import render

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
VARIANTS = {
    "as it is": {},
    "a fleet with keys": {"replicas": 3, "keys": "penstock-keys", "storageClass": "fast"},
    "a GPU and options": {"gpus": 1, "image": "penstock:cuda", "extraArgs": ["--max-len", "4096"]},
}


def _closed(required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    fields = {"properties": required | optional, "required": list(required)}
    return {"type": "object", **fields, "additionalProperties": False}


TEXT, COUNT, OBJECT = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
GROUP = {"rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": OBJECT}
WORKERS = _closed(
    GROUP | {"groupName": TEXT, "minReplicas": COUNT, "maxReplicas": COUNT}, {"replicas": COUNT, "numOfHosts": COUNT}
)
RAY_CLUSTER = _closed(  # the fields of ray.io/v1 that the file may use; no package has the operator's own schema
    {"headGroupSpec": _closed(GROUP, {"serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}})},
    {"workerGroupSpecs": {"type": "array", "items": WORKERS}, "rayVersion": TEXT},
)


def check_command(words: Sequence[str]) -> dict[str, Any]:
    """Returns the parsed options of a command line; fails if it is not one."""
    name = next(each for each in (" ".join(words[:2]), words[0]) if each in COMMANDS)
    parser = make_parser(name, command(name))
    parser.error = lambda message: pytest.fail(f"{words}: {message}")  # type: ignore[assignment, method-assign]
    return vars(parser.parse_intermixed_args(words[len(name.split()) :]))


def documents(text: str) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(text))
    for each in found:
        validate(each)
    return found


def validate(document: dict[str, Any]) -> None:
    """Checks a document by Kubernetes' own schemas, where these are installed."""
    assert {"apiVersion", "kind", "metadata"} <= document.keys()
    if document["kind"] == "RayCluster":  # of the operator; its pods are Kubernetes'
        assert document["apiVersion"] == "ray.io/v1"
        jsonschema.validate(document["spec"], RAY_CLUSTER)
        for pod in pods(document):
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})
        return
    try:
        import kubernetes_validate
    except ImportError:
        return
    kubernetes_validate.validate(document, "1.33", strict=True)


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the specs of all pods of a document."""
    spec = document["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if document["kind"] == "RayCluster" else [spec]
    for group in groups:
        if "template" in group:
            yield group["template"]["spec"]


def check_pod(pod: dict[str, Any]) -> None:
    """Checks that what a pod's containers name is there, and that no Service sets variables in it."""
    assert pod["enableServiceLinks"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        ports = {port["name"] for port in container.get("ports", ())}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        for probe in probes:
            where = probe.get("httpGet") or probe["tcpSocket"]
            assert where["port"] in ports
            assert where.get("path", "/health") == "/health"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_chart(variant: dict[str, Any]) -> None:
    values = VALUES | variant
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert schema["properties"].keys() - {"global"} == VALUES.keys()
    found = documents(render((CHART / "templates" / "server.yaml").read_text(), values))
    claim, deployment, service = found
    if helm := shutil.which("helm"):
        assert sorted(rendered(helm, variant), key=str) == sorted(found, key=str)
    (pod,) = pods(deployment)
    check_pod(pod)
    (container,) = pod["containers"]
    given = check_command(container["args"])
    fleet = values["replicas"] > 1
    assert container["args"][0] == ("fleet" if fleet else "serve")
    assert given["models"] == ["smollm2"]
    assert given.get("replicas", "1") == str(values["replicas"])
    assert given.get("max_len", 0) == (4096 if "extraArgs" in variant else 0)
    assert given.get("keys", "") == ("/keys/keys.json" if values["keys"] else "")
    assert given["port"] == container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"]
    assert pod["terminationGracePeriodSeconds"] > given["drain_seconds"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == values["gpus"]


def rendered(helm: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what Helm itself makes of the chart."""
    told = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    subprocess.run([helm, "lint", "--strict", "--quiet", CHART, *told], check=True)
    made = subprocess.run([helm, "template", "here", CHART, *told], check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(made.stdout))


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert __version__.startswith(chart["appVersion"])


def test_the_ray_cluster() -> None:
    claim, cluster, service = documents((DEPLOY / "kuberay.yaml").read_text())
    head, worker = pods(cluster)
    for pod in (head, worker):
        check_pod(pod)
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in pod["containers"][0]["args"][0]
    script = head["containers"][0]["args"][0]
    given = check_command(re.search(r"penstock (.*)$", script)[1].split())  # type: ignore[index]
    assert (given["ground"], given["ray"]) == ("ray", "auto")
    workers = cluster["spec"]["workerGroupSpecs"][0]
    assert int(given["replicas"]) == workers["replicas"] * int(workers["rayStartParams"]["num-cpus"])
    assert given["port"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert head["terminationGracePeriodSeconds"] > given["drain_seconds"]


def test_the_compose_file() -> None:
    if checker := shutil.which("check-jsonschema"):  # it has the schema of the compose specification
        subprocess.run([checker, "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"], check=True)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert compose["services"].keys() == {"server", "fleet", "gpu"}
    for service in compose["services"].values():
        given = check_command(service["command"])
        assert service["ports"] == [f"127.0.0.1:8000:{given['port']}"]
        assert given["host"] == "0.0.0.0"
        assert float(service["stop_grace_period"].removesuffix("s")) > given["drain_seconds"]
        assert service["build"]["target"] in stages
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= compose["volumes"].keys()


def test_the_image() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    given = check_command(json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]))  # type: ignore[index]
    exposed = re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)
    assert exposed is not None
    assert given["port"] == int(exposed[1])
    assert f"127.0.0.1:{given['port']}/health" in text
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    for extras in re.findall(r"\.whl\)\[([\w,]+)\]", text):
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    if hadolint := shutil.which("hadolint"):
        subprocess.run([hadolint, DEPLOY / "Dockerfile"], check=True)


def test_the_unit() -> None:
    lines = (DEPLOY / "penstock.service").read_text().splitlines()
    settings = [line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#")]
    unit = dict(settings)
    variables = dict(value.partition("=")[::2] for name, value in settings if name == "Environment")
    (fleet,) = re.findall(r'COMMAND="(.*)"$', "\n".join(line for line in lines if line.startswith("#")), re.MULTILINE)
    words = unit["ExecStart"].partition(" ")[2]
    for chosen in (variables["COMMAND"].strip('"'), fleet):
        line = words.replace("$COMMAND", chosen).replace("$LISTEN", variables["LISTEN"].strip('"'))
        given = check_command(line.split())
        assert float(unit["TimeoutStopSec"]) > given["drain_seconds"]
