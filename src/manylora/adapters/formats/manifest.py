"""The manifest in an adapter's folder: SHA-256 of its files, the base model's revision, a signature."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats.safe_files import OpenFile, list_files, read_small
from manylora.config.hub import model_revision
from manylora.errors import AdapterInvalidError

MANIFEST = "manylora-manifest.json"
KEY = "MANYLORA_MANIFEST_KEY"  # environment: a PEM file with the Ed25519 public key of the signatures
READ = ("*.json", "*.jinja", "*.safetensors", "*.npy", "*.nemo")  # files that may be read
FIELDS = ("files", "base_model_revision", "signature")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_BYTES = 2**18
PIECE = 2**20


def check_manifest(folder: Path, bounds: Bounds = ANY_MODEL, base: Path | None = None) -> bool:
    """Whether the folder has a manifest; it then holds. base: the base model's folder; None: not known.
    Raises AdapterInvalidError, OSError.
    """
    if not os.path.lexists(folder / MANIFEST):
        return False
    found = read_manifest(read_small(folder / MANIFEST, bounds, MAX_BYTES))
    files, wanted = found["files"], found.get("base_model_revision")
    if wanted is not None and (has := base and model_revision(base)) != wanted:
        theirs = f"this one is {has}" if has else "that of this model is not known: serve it by its hub id"
        raise AdapterInvalidError(f"{MANIFEST} is for revision {wanted} of the base model, and {theirs}")
    present = {file.name for file in list_files(folder, "")} - {MANIFEST}
    for name in sorted(present):
        if any(fnmatch(name, one) for one in READ) and name not in files:
            raise AdapterInvalidError(f"{name} is not in {MANIFEST}, which must list each file")
    for name in sorted(present & files.keys()):
        if (digest := sha256_of(folder / name, bounds)) != files[name]:
            raise AdapterInvalidError(f"{name} is not the file of {MANIFEST}: its sha256 is {digest}")
    return True


def read_manifest(content: bytes) -> dict[str, Any]:
    """files: name to SHA-256 in hexadecimal. Raises AdapterInvalidError, also for a signature that does not
    hold, or cannot be checked, or is missing although a key is set.
    """
    try:
        found = json.loads(content)
        files = found["files"]
        right = isinstance(files, dict) and all(SHA256.fullmatch(one) for one in files.values())
        right = right and all(isinstance(found[name], str) for name in FIELDS[1:] if name in found)
    except (ValueError, TypeError, KeyError, RecursionError):
        right = False
    if not right:
        raise AdapterInvalidError(
            f'{MANIFEST} must be {{"files": {{NAME: SHA-256 in hexadecimal}}}}, with optional texts '
            f"{' and '.join(FIELDS[1:])}"
        )
    if unknown := found.keys() - set(FIELDS):
        raise AdapterInvalidError(f"{MANIFEST} has the unknown field {min(unknown)!r:.80}")
    _check_signature(found)
    return dict(found)


def signed_text(manifest: dict[str, Any]) -> bytes:
    """What the signature is of: the manifest without it, as JSON with sorted keys and no spaces."""
    rest = {name: value for name, value in manifest.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def _check_signature(manifest: dict[str, Any]) -> None:
    file, signature = os.environ.get(KEY), manifest.get("signature")
    if file is None and signature is None:
        return
    if file is None or signature is None:
        what = "is signed: set" if file is None else "is not signed: sign it, or unset"
        raise AdapterInvalidError(f"{MANIFEST} {what} {KEY}, a PEM file with an Ed25519 public key")
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise AdapterInvalidError(f"{KEY} needs cryptography: pip install 'manylora[sources]'") from None
    try:
        key = load_pem_public_key(Path(file).read_bytes())
    except (OSError, ValueError):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise AdapterInvalidError(f"{KEY} must name a PEM file with an Ed25519 public key")
    try:
        key.verify(base64.b64decode(signature, validate=True), signed_text(manifest))
    except (InvalidSignature, ValueError):
        raise AdapterInvalidError(f"the signature of {MANIFEST} is not by the key of {KEY}") from None


def sha256_of(path: Path, bounds: Bounds = ANY_MODEL) -> str:
    """Of a file, in hexadecimal. Raises AdapterInvalidError, OSError."""
    file, digest = OpenFile(path, bounds), hashlib.sha256()
    for start in range(0, file.size, PIECE):
        digest.update(file.read(start, min(PIECE, file.size - start)))
    return digest.hexdigest()
