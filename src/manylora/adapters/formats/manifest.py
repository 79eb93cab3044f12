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
from manylora.config.model_folder import model_revision
from manylora.errors import AdapterInvalidError

MANIFEST = "manylora-manifest.json"
KEY = "MANYLORA_MANIFEST_KEY"  # environment: a PEM file with the Ed25519 public key of the signatures
READ = ("*.json", "*.jinja", "*.safetensors", "*.npy", "*.nemo", "*.gguf")  # files that may be read
FIELDS = ("files", "base_model_revision", "signature")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_BYTES, PIECE = 2**18, 2**20


def check_manifest(folder: Path, bounds: Bounds, base: Path | None) -> bool:
    """Whether the folder has a manifest; it then holds. base: the base model's folder; None: not known.
    Raises AdapterInvalidError, also for a signature that does not hold or cannot be checked, or is missing
    although a key is set; OSError.
    """
    if not os.path.lexists(folder / MANIFEST):
        return False
    try:
        found = json.loads(read_small(folder / MANIFEST, bounds, MAX_BYTES))
        files, wanted = found["files"], found.get("base_model_revision")
        right = all(SHA256.fullmatch(one) for one in files.values()) and found.keys() <= set(FIELDS)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        right = False
    if not right:
        names = '{"files": {NAME: SHA-256 in hexadecimal}}'
        raise AdapterInvalidError(f"{MANIFEST} must be {names}, with {' and '.join(FIELDS[1:])} if need be")
    _check_signature(found)
    if wanted is not None and (has := base and model_revision(base)) != wanted:
        theirs = f"this one is {has}" if has else "that of this model is not known: serve it by its hub id"
        raise AdapterInvalidError(f"{MANIFEST} is for revision {wanted} of the base model, and {theirs}")
    for path in list_files(folder, ""):
        if path.name in files and (digest := sha256_of(path, bounds)) != files[path.name]:
            raise AdapterInvalidError(f"{path.name} is not the file of {MANIFEST}: its sha256 is {digest}")
        if path.name not in (*files, MANIFEST) and any(fnmatch(path.name, one) for one in READ):
            raise AdapterInvalidError(f"{path.name} is not in {MANIFEST}, which must list each file")
    return True


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
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise AdapterInvalidError(f"{KEY} needs cryptography: pip install 'manylora[sources]'") from None
    try:
        key: Any = load_pem_public_key(Path(file).read_bytes())
        key.verify(base64.b64decode(signature, validate=True), signed_text(manifest))
    except InvalidSignature:
        raise AdapterInvalidError(f"the signature of {MANIFEST} is not by the key of {KEY}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        told = f"the signature of {MANIFEST} cannot be checked with {KEY}, which must be an Ed25519 key"
        raise AdapterInvalidError(told) from error


def sha256_of(path: Path, bounds: Bounds = ANY_MODEL) -> str:
    """Of a file, in hexadecimal. Raises AdapterInvalidError, OSError."""
    file, digest = OpenFile(path, bounds), hashlib.sha256()
    for start in range(0, file.size, PIECE):
        digest.update(file.read(start, min(PIECE, file.size - start)))
    return digest.hexdigest()
