"""What `kubectl kustomize` makes of a folder, as far as deploy/kubernetes uses kustomize.

test_kubernetes.py compares it with kubectl's own result where kubectl is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
# Lists that a strategic merge patch joins by this key of their items; other lists it replaces.
MERGE_KEYS = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath", "env": "name"}
KNOWN = {"apiVersion", "kind", "resources", "images", "patches", "configMapGenerator"}


def render(folder: Path) -> list[Object]:
    """The objects of one kustomization. Raises ValueError for a key that is not known here."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := plan.keys() - KNOWN:
        raise ValueError(f"{folder}: {unknown}")
    objects: list[Object] = []
    for name in plan.get("resources", []):
        path = (folder / name).resolve()
        objects += render(path) if path.is_dir() else read(path)
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


def read(path: Path) -> list[Object]:
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
