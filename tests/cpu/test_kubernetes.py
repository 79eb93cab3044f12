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

import pytest
import yaml
from kustomized import Object, containers, name_of, pod_of, render

from manylora.doors.cli import triton
from manylora.doors.http import arguments, options
from manylora.doors.http.app import ROUTES
from manylora.doors.http.serving.metrics import GATEWAY_METRICS
from manylora.doors.triton.metrics import LORA_INFO

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
def test_the_server_takes_its_command(plan: str, one: Object, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("plan", "one"), SERVER_PODS, ids=lambda x: x if isinstance(x, str) else "")
def test_probes_ask_what_the_server_answers(plan: str, one: Object) -> None:
    (container,) = containers(one)
    ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert ports.get(probe["port"], probe["port"]) in ports.values()
    paths = {name: probe["path"] for name, probe in probes.items()}
    if container["args"][0] == "serve":
        served = {path: name for _, path, name in ROUTES}
        assert served[paths["startup"]] == served[paths["readiness"]] == "ready"
        assert served[paths["liveness"]] == "live"
    else:
        ready, live = "/v2/health/ready", "/v2/health/live"
        assert paths == {"startup": ready, "readiness": ready, "liveness": live}


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
def test_images_are_those_of_the_documents(plan: str) -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    built = {name if ":" in name else f"{name}:latest" for name in re.findall(r"-t (manylora\S*)", text)}
    (container,) = containers(of(plan, "Deployment"))
    assert container["image"] in built
    assert (container["image"] == "manylora:cuda") == ("nvidia.com/gpu" in container["resources"]["limits"])


def claims_of(spec: Object) -> set[str]:
    """Of the volumes of a pod."""
    volumes = [volume.get("persistentVolumeClaim") for volume in spec["volumes"]]
    return {claim["claimName"] for claim in volumes if claim is not None}


@pytest.mark.parametrize("plan", SERVERS)
def test_names_lead_to_what_is_there(plan: str) -> None:
    labels = of(plan, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of(plan, "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert of(plan, "Service")["spec"]["selector"] == labels
    assert of(plan, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    claims = {name_of(one) for one in RENDERED[plan] if one["kind"] == "PersistentVolumeClaim"}
    assert claims_of(pod_of(of(plan, "Deployment"))) == claims
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


def test_the_monitor_finds_the_service_and_the_dashboard_is_ours() -> None:
    monitor = of("monitoring", "ServiceMonitor")["spec"]
    service = of("base", "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["jobLabel"] in service["metadata"]["labels"]
    dashboard = of("monitoring", "ConfigMap", "manylora-dashboard")["data"]["manylora.json"]
    assert json.loads(dashboard)["panels"]


@pytest.mark.parametrize("plan", SERVERS)
def test_metrics_are_scraped_where_the_server_has_them(plan: str) -> None:
    """`manylora serve` on its own port; Triton on one of their own."""
    (endpoint,) = of("monitoring", "ServiceMonitor")["spec"]["endpoints"]
    ports = {port["name"]: port["targetPort"] for port in of(plan, "Service")["spec"]["ports"]}
    (container,) = containers(of(plan, "Deployment"))
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert numbers[ports[endpoint["port"]]] == (8002 if plan == "triton" else 8000)
    assert endpoint["path"] == "/metrics"
