"""Protects who applies deploy/kubernetes: Kubernetes takes the objects, the servers take what is in them, and
what names another object, port, path, metric or file finds it.

Kubernetes' own kinds are checked against its published schemas, in the package kubernetes-validate. None
carries those of the other kinds; SHAPES has the fields of them that are used, and which are required, as in
the CRDs of the releases named there.
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
from kustomized import Object, containers, name_of, render

from manylora.commands import triton
from manylora.group.place import Place, find_place
from manylora.openai import arguments, options
from manylora.openai.app import ROUTES
from manylora.openai.serving.metrics import GATEWAY_METRICS
from manylora.wire.metrics import LORA_INFO

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PLANS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
RENDERED = {name: render(FOLDER / name) for name in PLANS}
SERVERS = [name for name in PLANS if name not in ("monitoring", "hosts", "volumes")]
OBJECTS = [(plan, one) for plan, found in RENDERED.items() for one in found]
DIFFERENT = list({json.dumps(one, sort_keys=True): (plan, one) for plan, one in OBJECTS}.values())
VERSION = "1.37"


def fields(required: list[str], **known: Any) -> Object:
    return {"type": "object", "required": required, "properties": known, "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PORT = fields(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": TEXT}
LIST = {"type": "array", "minItems": 1}
SHAPES = {
    # gateway-api-inference-extension 1.6
    "inference.networking.k8s.io/v1 InferencePool": fields(
        ["selector", "targetPorts"],
        selector=fields(["matchLabels"], matchLabels=LABELS),
        targetPorts=LIST | {"items": PORT, "maxItems": 8},
        endpointPickerRef=fields(
            ["name", "port"], name=TEXT, port=PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
    # llm-d-router 0.9, which has taken it over from that project
    "llm-d.ai/v1alpha2 InferenceObjective": fields(
        ["poolRef"], poolRef=fields(["name"], name=TEXT), priority=NUMBER
    ),
    # Gateway API 1
    "gateway.networking.k8s.io/v1 HTTPRoute": fields(
        ["parentRefs", "rules"],
        parentRefs=LIST | {"items": fields(["name"], name=TEXT)},
        hostnames=LIST,
        rules=LIST
        | {
            "items": fields(
                ["backendRefs"],
                matches=LIST,
                backendRefs=LIST | {"items": fields(["name"], group=TEXT, kind=TEXT, name=TEXT)},
                timeouts=fields([], request={"type": "string", "pattern": r"^\d+(s|m)$"}),
            )
        },
    ),
    # LeaderWorkerSet 0.9; its templates are Kubernetes' own, see below
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": fields(
        ["leaderWorkerTemplate"], replicas=NUMBER, startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=fields(
            ["workerTemplate"], size=NUMBER, leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        ),
    ),
    # prometheus-operator
    "monitoring.coreos.com/v1 ServiceMonitor": fields(
        ["selector", "endpoints"],
        selector=fields(["matchLabels"], matchLabels=LABELS),
        jobLabel=TEXT,
        endpoints=LIST | {"items": fields(["port"], port=TEXT, path=TEXT, interval=TEXT)},
    ),
    # KEDA 2
    "keda.sh/v1alpha1 ScaledObject": fields(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=fields(["name"], name=TEXT),
        minReplicaCount=NUMBER, maxReplicaCount=NUMBER, pollingInterval=NUMBER,
        advanced=fields([], horizontalPodAutoscalerConfig=fields([], behavior={"type": "object"})),
        triggers=LIST
        | {"items": fields(["type", "metadata"], type=TEXT, metricType=TEXT, metadata=fields(
            ["serverAddress", "query", "threshold"], serverAddress=TEXT, query=TEXT, threshold=TEXT,
        ))},
    ),
    # KServe 0.17; its containers and volumes are Kubernetes' own, see below
    "serving.kserve.io/v1alpha1 ServingRuntime": fields(
        ["containers"], annotations=LABELS, containers=LIST, volumes=LIST,
        supportedModelFormats=LIST
        | {"items": fields(["name"], name=TEXT, version=TEXT, autoSelect={"type": "boolean"})},
    ),
    "serving.kserve.io/v1beta1 InferenceService": fields(
        ["predictor"],
        predictor=fields(
            [], minReplicas=NUMBER, maxReplicas=NUMBER, terminationGracePeriodSeconds=NUMBER,
            model=fields(
                ["modelFormat"], runtime=TEXT, storageUri=TEXT, modelFormat=fields(["name"], name=TEXT)
            ),
        ),
    ),
}  # fmt: skip


def of(plan: str, kind: str, name: str = "manylora") -> Object:
    (found,) = [one for one in RENDERED[plan] if (one["kind"], name_of(one)) == (kind, name)]
    return found


def pod(one: Object) -> Object:
    """A pod's spec, of a Deployment or of what KServe makes one of."""
    spec: Object = one["spec"]["template"]["spec"] if one["kind"] == "Deployment" else one["spec"]
    return spec


SERVER_PODS = [
    (plan, one)
    for plan, one in OBJECTS
    if one["kind"] in ("Deployment", "ServingRuntime") and name_of(one) == "manylora"
]


@pytest.mark.extended  # Kubernetes' schemas: make test-all
@pytest.mark.parametrize(("plan", "one"), DIFFERENT, ids=lambda x: x if isinstance(x, str) else x["kind"])
def test_kubernetes_takes_every_object(plan: str, one: Object) -> None:
    jsonschema, kubernetes_validate = map(pytest.importorskip, ("jsonschema", "kubernetes_validate"))
    kind = f"{one['apiVersion']} {one['kind']}"
    if kind not in SHAPES:
        kubernetes_validate.validate(one, VERSION, strict=True)
        return
    jsonschema.validate(one["spec"], SHAPES[kind])
    assert one.keys() == {"apiVersion", "kind", "metadata", "spec"}
    if one["kind"] == "ServingRuntime":
        spec = {"containers": one["spec"]["containers"], "volumes": one["spec"]["volumes"]}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(whole, VERSION, strict=True)


@pytest.mark.extended
def test_kubernetes_takes_what_lies_inside_of_other_kinds() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    keda = of("keda", "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    target = {"scaleTargetRef": {"kind": "Deployment", "name": "x"}, "maxReplicas": 2, "behavior": keda}
    wholes = [{**of("base", "HorizontalPodAutoscaler"), "spec": target}]
    group = of("hosts", "LeaderWorkerSet", "manylora-ranks")["spec"]["leaderWorkerTemplate"]
    for kind in ("leader", "worker"):
        spec = group[f"{kind}Template"]["spec"]
        wholes.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec})
    for whole in wholes:
        kubernetes_validate.validate(whole, VERSION, strict=True)


@pytest.mark.extended
def test_a_wrong_field_is_found() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    wrong = json.loads(json.dumps(of("base", "Deployment")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("plan", PLANS)
def test_kubectl_renders_the_same(plan: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / plan)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stderr
    key = lambda one: (one["kind"], name_of(one))  # noqa: E731
    assert sorted(yaml.safe_load_all(said.stdout), key=key) == sorted(RENDERED[plan], key=key)


@pytest.mark.parametrize("plan", PLANS)
def test_every_file_is_used(plan: str) -> None:
    text = (FOLDER / plan / "kustomization.yaml").read_text(encoding="utf-8")
    for path in (FOLDER / plan).iterdir():
        assert path.name == "kustomization.yaml" or path.name in text


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
    assert mounts[str(root)]["readOnly"]
    if one["kind"] == "Deployment":  # KServe mounts the model and ends the pod by the InferenceService
        assert mounts[args[0]]["readOnly"]
        grace = pod(one)["terminationGracePeriodSeconds"]
    else:
        grace = of(plan, "InferenceService", "chat")["spec"]["predictor"]["terminationGracePeriodSeconds"]
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
    [(p, o) for p, o in OBJECTS if o["kind"] in ("Deployment", "ServingRuntime")],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_no_root_and_nothing_to_write_but_what_is_needed(plan: str, one: Object) -> None:
    spec = pod(one)
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
    one = of(plan, "ServingRuntime" if plan == "kserve" else "Deployment")
    (container,) = containers(one)
    assert container["image"] in built
    assert (container["image"] == "manylora:cuda") == ("nvidia.com/gpu" in container["resources"]["limits"])


def claims_of(spec: Object) -> set[str]:
    """Of the volumes of a pod."""
    volumes = [volume.get("persistentVolumeClaim") for volume in spec["volumes"]]
    return {claim["claimName"] for claim in volumes if claim is not None}


@pytest.mark.parametrize("plan", [name for name in SERVERS if name != "kserve"])
def test_names_lead_to_what_is_there(plan: str) -> None:
    labels = of(plan, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of(plan, "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert of(plan, "Service")["spec"]["selector"] == labels
    assert of(plan, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    claims = {name_of(one) for one in RENDERED[plan] if one["kind"] == "PersistentVolumeClaim"}
    assert claims_of(pod(of(plan, "Deployment"))) == claims
    scalers = [one for one in RENDERED[plan] if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert len(scalers) == (plan != "gpu"), "two would fight"
    for one in scalers:
        assert one["spec"]["scaleTargetRef"]["name"] == "manylora"
    # Applied once more, a number in the manifest would undo what the autoscaler has chosen.
    assert ("replicas" in of(plan, "Deployment")["spec"]) == (not scalers)


def test_both_autoscalers_take_replicas_away_slowly() -> None:
    """KEDA's own `cooldownPeriod` is for the way to no replicas at all."""
    mine = of("base", "HorizontalPodAutoscaler")["spec"]["behavior"]
    keda = of("keda", "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert mine == keda


@pytest.mark.parametrize("kind", ["leader", "worker"])
def test_each_pod_of_a_group_is_one_rank_of_the_same_engine(kind: str) -> None:
    group = of("hosts", "LeaderWorkerSet", "manylora-ranks")["spec"]["leaderWorkerTemplate"]
    template = group[f"{kind}Template"]
    (container,) = template["spec"]["containers"]
    for key in ("command", "args", "image", "env", "resources", "lifecycle", "securityContext"):
        assert container[key] == group["workerTemplate"]["spec"]["containers"][0][key]
    base = of("gpu", "Deployment")["spec"]["template"]["spec"]
    (server,) = base["containers"]
    for key in ("image", "env", "resources", "lifecycle", "securityContext"):
        assert container[key] == server[key]
    assert template["spec"]["securityContext"] == base["securityContext"]
    mounted = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in template["spec"]["volumes"]}
    assert mounted["model"]["readOnly"] and mounted["adapters"]["readOnly"]
    rank_0, port = ("startupProbe" in container, 29500)
    assert rank_0 == (kind == "leader") == ("ports" in container)
    if rank_0:
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002, "ranks": port}
        for name in ("startupProbe", "readinessProbe"):
            assert container[name]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
        assert "livenessProbe" not in container, "a rank 0 that waits for the others is alive"


def test_a_group_starts_the_launcher_with_the_variables_that_it_reads() -> None:
    container = of("hosts", "LeaderWorkerSet", "manylora-ranks")["spec"]["leaderWorkerTemplate"][
        "leaderTemplate"
    ]["spec"]["containers"][0]
    assert container["command"] == ["sh", "-c"]
    given = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader"}
    (line,) = container["args"]
    for name, value in given.items():
        line = line.replace(f"${name}", value)
    assert "$" not in line
    variables, command = line.split(" exec manylora triton ")
    environment = dict(pair.split("=") for pair in variables.split())
    options = triton.argument_parser().parse_args(command.split())
    assert find_place(options.world_size, environment) == Place(1, 2, 0, 1, "leader", 29500)
    assert options.foreground and str(options.lora_root) == "/adapters" and options.model == "/model"
    name = name_of(next(one for one in RENDERED["hosts"] if one["kind"] == "LeaderWorkerSet"))
    assert of("hosts", "Service")["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": name, "leaderworkerset.sigs.k8s.io/worker-index": "0"
    }  # fmt: skip


def test_pods_of_a_group_find_each_other() -> None:
    """By a headless Service of the group's own name, which LeaderWorkerSet makes if there is none yet."""
    groups = {name_of(one) for one in RENDERED["hosts"] if one["kind"] == "LeaderWorkerSet"}
    services = {name_of(one) for one in RENDERED["hosts"] if one["kind"] == "Service"}
    assert groups and services
    assert not groups & services


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


def test_the_queue_that_scales_is_exported_and_the_dashboard_is_ours() -> None:
    query = of("keda", "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert set(re.findall(r"vllm:\w+", query)) <= set(GATEWAY_METRICS)
    monitor = of("monitoring", "ServiceMonitor")["spec"]
    service = of("base", "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["jobLabel"] in service["metadata"]["labels"] and 'job="manylora"' in query
    dashboard = of("monitoring", "ConfigMap", "manylora-dashboard")["data"]["manylora.json"]
    assert json.loads(dashboard)["panels"]


def leader_or_pod(plan: str) -> Object:
    """What takes the requests."""
    if plan != "hosts":
        return pod(of(plan, "Deployment"))
    group = of(plan, "LeaderWorkerSet", "manylora-ranks")["spec"]["leaderWorkerTemplate"]
    spec: Object = group["leaderTemplate"]["spec"]
    return spec


@pytest.mark.parametrize("plan", [*(name for name in SERVERS if name != "kserve"), "hosts"])
def test_metrics_are_scraped_where_the_server_has_them(plan: str) -> None:
    """`manylora serve` on its own port; Triton on one of their own."""
    (endpoint,) = of("monitoring", "ServiceMonitor")["spec"]["endpoints"]
    ports = {port["name"]: port["targetPort"] for port in of(plan, "Service")["spec"]["ports"]}
    (container,) = leader_or_pod(plan)["containers"]
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    triton_server = plan in ("triton", "hosts")
    assert numbers[ports[endpoint["port"]]] == (8002 if triton_server else 8000)
    assert endpoint["path"] == "/metrics"


def test_the_runtime_is_the_one_that_the_example_names() -> None:
    service = of("kserve", "InferenceService", "chat")["spec"]["predictor"]["model"]
    runtime = of("kserve", "ServingRuntime")["spec"]
    assert service["runtime"] == "manylora"
    assert service["modelFormat"]["name"] in {one["name"] for one in runtime["supportedModelFormats"]}
    port = str(containers(of("kserve", "ServingRuntime"))[0]["ports"][0]["containerPort"])
    assert runtime["annotations"]["prometheus.kserve.io/port"] == port
    claims = {name_of(one) for one in RENDERED["kserve"] if one["kind"] == "PersistentVolumeClaim"}
    assert claims_of(runtime) | {service["storageUri"].removeprefix("pvc://")} == claims
