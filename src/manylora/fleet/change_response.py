"""The response to a request that changes adapters, once all servers of a fleet were told. Does not need
Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from starlette.responses import Response

from manylora.fleet.member import Changed
from manylora.fleet.remote_http import RemoteResponse
from manylora.lora.catalog.shared import State
from manylora.openai.adapter_routes import deleted, unloaded

SILENT = "it has not answered in time"


def change_response(
    changed: Changed, method: str, path: str, states: Mapping[str, State], missing: Sequence[str]
) -> Response:
    """The first server's response, combined with the others' states. 202 if not all have followed; it names
    those.

    states: by replica. missing: replicas that have not answered. The others follow as soon as they can.
    """
    first = changed.answer
    if first.status >= HTTPStatus.BAD_REQUEST or not changed.name:
        return _response(first, first.status, first.body)
    late = dict.fromkeys(missing, SILENT) | {
        replica: state.problem or "it does not know of the change yet"
        for replica, state in states.items()
        if state.problem or state.revision < changed.revision
    }
    status, told = first.status, first.body
    if method == "DELETE" or "/unload_" in path:
        running = sum(state.running for state in states.values())
        response = (deleted if method == "DELETE" else unloaded)(changed.name, running)
        status, told = response.status_code, bytes(response.body)
    status = HTTPStatus.ACCEPTED if late else status
    having = sorted(states.keys() - late.keys())
    if method in ("PUT", "DELETE"):
        body = json.loads(told) | {"replicas": having, "late": late}
        return _response(first, status, json.dumps(body).encode())
    lines = [told.decode(), _where(states, having)]
    lines += [f"Not yet on replica {replica}: {reason}" for replica, reason in sorted(late.items())]
    return _response(first, status, "\n".join(lines).encode())


def _where(states: Mapping[str, State], having: Sequence[str]) -> str:
    versions = {(states[one].version, states[one].digest) for one in having if states[one].digest}
    told = "".join(f", version {number}, digest {digest}" for number, digest in sorted(versions))
    return f"On {len(having)} replica{'' if len(having) == 1 else 's'}{told}."


def _response(first: RemoteResponse, status: int, body: bytes) -> Response:
    response = Response(body, status)
    kept = [one for one in first.headers if one[0] != b"content-length"]
    response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
    return response
