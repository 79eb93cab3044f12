"""Protects who applies deploy/kubernetes: Kubernetes takes the objects, the servers take what is in them, and
what names another object, port, path, metric or file finds it.

Kubernetes' own kinds are checked against its published schemas, in the package kubernetes-validate. There is
nothing to check the other kinds with.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from manylora.doors.cli import triton
from manylora.doors.http import arguments, options
from manylora.doors.http.app import ROUTES
from manylora.doors.http.serving.metrics import GATEWAY_METRICS
from manylora.doors.triton.metrics import LORA_INFO

Object = dict[str, Any]
# Lists that a strategic merge patch joins by this key of their items; other lists it replaces.
MERGE_KEYS = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath", "env": "name"}
KNOWN = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator"}


def render(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a folder, as far as deploy/kubernetes uses kustomize. Raises
    ValueError for a key that is not known here."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := plan.keys() - KNOWN:
        raise ValueError(f"{folder}: {unknown}")
    objects: list[Object] = []
    for name in plan.get("resources", []):
        path = (folder / name).resolve()
        objects += render(path) if path.is_dir() else read_objects(path)
    objects += [_config_map(folder, one) for one in plan.get("configMapGenerator", [])]
    for patch in plan.get("patches", []):
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        change = yaml.safe_load(text)
        target = patch.get("target") or {"kind": change["kind"], "name": change["metadata"]["name"]}
        (found,) = [one for one in objects if (one["kind"], name_of(one)) == (target["kind"], target["name"])]
        if isinstance(change, list):
            _apply(found, change)
        elif change.pop("$patch", None) == "delete":
            objects.remove(found)
        else:
            _merge(found, change)
    for image in plan.get("images", []):
        for container in (c for one in objects if one["kind"] == "Deployment" for c in containers(one)):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['name']}:{image['newTag']}"
    return objects


def read_objects(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def name_of(one: Object) -> str:
    name: str = one["metadata"]["name"]
    return name


def pod_of(deployment: Object) -> Object:
    """The spec of its pods."""
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def containers(deployment: Object) -> list[Object]:
    found: list[Object] = pod_of(deployment)["containers"]
    return found


def _config_map(folder: Path, wanted: Object) -> Object:
    data = {Path(name).name: (folder / name).read_text(encoding="utf-8") for name in wanted["files"]}
    labels = wanted["options"].get("labels")
    metadata = {"name": wanted["name"]} | ({"labels": labels} if labels else {})
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": data, "metadata": metadata}


def _merge(into: Object, change: Object) -> None:
    for key, value in change.items():
        old = into.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, list) and isinstance(old, list) and key in MERGE_KEYS:
            for item in value:
                same = [one for one in old if one[MERGE_KEYS[key]] == item[MERGE_KEYS[key]]]
                _merge(same[0], item) if same else old.insert(0, item)
        elif key == "ports" and isinstance(old, list):
            kept = [one for one in old if one["containerPort"] not in {p["containerPort"] for p in value}]
            into[key] = value + kept
        else:
            into[key] = value


def _apply(into: Object, operations: list[Object]) -> None:
    """JSON patch: add at the end of a list, replace."""
    for operation in operations:
        *path, last = operation["path"].strip("/").split("/")
        place: Any = into
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        if operation["op"] == "add" and last == "-":
            place.append(operation["value"])
        elif operation["op"] == "replace" and last in place:
            place[last] = operation["value"]
        else:
            raise ValueError(operation)


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PLANS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
RENDERED = {name: render(FOLDER / name) for name in PLANS}
SERVERS = [name for name in PLANS if name != "monitoring"]
OBJECTS = [(plan, one) for plan, found in RENDERED.items() for one in found]
DIFFERENT = list({json.dumps(one, sort_keys=True): (plan, one) for plan, one in OBJECTS}.values())
VERSION = "1.37"
FOREIGN = ("inference.networking.k8s.io", "llm-d.ai", "gateway.networking.k8s.io", "monitoring.coreos.com")


def of(plan: str, kind: str, name: str = "manylora") -> Object:
    (found,) = [one for one in RENDERED[plan] if (one["kind"], name_of(one)) == (kind, name)]
    return found


SERVER_PODS = [
    (plan, one) for plan, one in OBJECTS if one["kind"] == "Deployment" and name_of(one) == "manylora"
]


@pytest.mark.extended  # Kubernetes' schemas: make test-all
@pytest.mark.parametrize(("plan", "one"), DIFFERENT, ids=lambda x: x if isinstance(x, str) else x["kind"])
def test_kubernetes_takes_every_object(plan: str, one: Object) -> None:
    if one["apiVersion"].partition("/")[0] not in FOREIGN:
        pytest.importorskip("kubernetes_validate").validate(one, VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("plan", PLANS)
def test_kubectl_renders_the_same(plan: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / plan)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stderr
    key = lambda one: (one["kind"], name_of(one))  # noqa: E731
    assert sorted(yaml.safe_load_all(said.stdout), key=key) == sorted(RENDERED[plan], key=key)


@pytest.mark.parametrize(("plan", "one"), SERVER_PODS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_server_takes_its_command_and_answers_its_probes(
    plan: str, one: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options.Path, "is_dir", lambda _: True)  # the folders are the container's
    (container,) = containers(one)
    command, *args = container["args"]
    ports = {port.get("name", "http"): port["containerPort"] for port in container["ports"]}
    if command == "serve":
        given = arguments.parse_options(args)
        assert (given.host, given.port) == ("0.0.0.0", ports["http"])
        drain, (root,) = given.drain_seconds, given.lora_root
    else:
        taken = triton.argument_parser().parse_args(args)
        assert taken.foreground
        assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
        drain, root = taken.drain_timeout, taken.lora_root
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(root)]["readOnly"] and mounts[args[0]]["readOnly"]
    grace = pod_of(one)["terminationGracePeriodSeconds"]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace >= wait + drain + 10
    asked = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {ports.get(probe["port"], probe["port"]) for probe in asked} <= {*ports.values()}
    served = {path: name for _, path, name in ROUTES} if command == "serve" else {}
    paths = [served.get(probe["path"], probe["path"]) for probe in asked]
    ready, live = ("ready", "live") if command == "serve" else ("/v2/health/ready", "/v2/health/live")
    assert paths == [ready, ready, live]


@pytest.mark.parametrize(
    ("plan", "one"),
    [(p, o) for p, o in OBJECTS if o["kind"] == "Deployment"],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_no_root_and_nothing_to_write_but_what_is_needed(plan: str, one: Object) -> None:
    spec = pod_of(one)
    (container,) = containers(one)
    rights = spec.get("securityContext", {}) | container["securityContext"]
    assert rights["runAsNonRoot"] and rights["runAsUser"] > 0
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        assert mount.get("readOnly") or "sizeLimit" in volume["emptyDir"]
    assert "memory" in container["resources"]["limits"]
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    if name_of(one) == "manylora":
        assert f"--uid {rights['runAsUser']} " in image
        written = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert {e["name"]: e["value"] for e in container["env"]}["HOME"] in written
        assert "/tmp" in written


@pytest.mark.parametrize("plan", SERVERS)
def test_names_lead_to_what_is_there(plan: str) -> None:
    labels = of(plan, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of(plan, "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert of(plan, "Service")["spec"]["selector"] == labels
    assert of(plan, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    claims = {name_of(one) for one in RENDERED[plan] if one["kind"] == "PersistentVolumeClaim"}
    volumes = [volume.get("persistentVolumeClaim") for volume in pod_of(of(plan, "Deployment"))["volumes"]]
    assert {claim["claimName"] for claim in volumes if claim is not None} == claims
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    built = {name if ":" in name else f"{name}:latest" for name in re.findall(r"-t (manylora\S*)", text)}
    (container,) = containers(of(plan, "Deployment"))
    assert container["image"] in built
    assert (container["image"] == "manylora:cuda") == ("nvidia.com/gpu" in container["resources"]["limits"])
    scalers = [one for one in RENDERED[plan] if one["kind"] == "HorizontalPodAutoscaler"]
    assert len(scalers) == (plan != "gpu")
    for one in scalers:
        assert one["spec"]["scaleTargetRef"]["name"] == "manylora"
    # Applied once more, a number in the manifest would undo what the autoscaler has chosen.
    assert ("replicas" in of(plan, "Deployment")["spec"]) == (not scalers)


def test_the_gateway_picks_among_the_servers() -> None:
    pool = of("gateway", "InferencePool")["spec"]
    server, picker = of("gateway", "Deployment"), of("gateway", "Deployment", "manylora-picker")
    assert pool["selector"]["matchLabels"] == server["spec"]["template"]["metadata"]["labels"]
    ports = [port["containerPort"] for port in containers(server)[0]["ports"]]
    assert [port["number"] for port in pool["targetPorts"]] == ports
    service = of("gateway", "Service", pool["endpointPickerRef"]["name"])["spec"]
    assert service["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    assert service["selector"] == picker["spec"]["template"]["metadata"]["labels"] != pool["selector"]
    route = of("gateway", "HTTPRoute")["spec"]
    assert route["rules"][0]["backendRefs"][0]["name"] == name_of(of("gateway", "InferencePool"))
    assert f"--allowed-hosts={route['hostnames'][0]}" in containers(server)[0]["args"]
    for name in ("interactive", "batch"):
        assert of("gateway", "InferenceObjective", f"manylora-{name}")["spec"]["poolRef"] == {
            "name": "manylora"
        }


def test_the_picker_reads_metrics_that_are_exported() -> None:
    text = (FOLDER / "gateway" / "plugins.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"# (?:reads )?(vllm:\w+)", text))
    assert len(named) == 3 and named <= {*GATEWAY_METRICS, LORA_INFO}
    plugins = yaml.safe_load(text)
    known = {plugin["type"] for plugin in plugins["plugins"]}
    assert {one["pluginRef"] for one in plugins["schedulingProfiles"][0]["plugins"]} < known
    assert "/metrics" in {path for _, path, _ in ROUTES}


@pytest.mark.parametrize("plan", SERVERS)
def test_metrics_are_scraped_where_the_server_has_them(plan: str) -> None:
    """`manylora serve` on its own port; Triton on one of their own."""
    monitor, service = of("monitoring", "ServiceMonitor")["spec"], of(plan, "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["jobLabel"] in service["metadata"]["labels"]
    (endpoint,) = monitor["endpoints"]
    ports = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    (container,) = containers(of(plan, "Deployment"))
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert numbers[ports[endpoint["port"]]] == (8002 if plan == "triton" else 8000)
    assert endpoint["path"] == "/metrics"
    dashboard = of("monitoring", "ConfigMap", "manylora-dashboard")["data"]["manylora.json"]
    assert json.loads(dashboard)["panels"]
