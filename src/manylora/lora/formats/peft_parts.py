"""Which tensors of a PEFT directory belong to the same linear layer, and why others are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_names import PEFT_KEY, VISION, layer_of, module_id_of
from manylora.lora.formats.tensor_files import RawTensor
from manylora.lora.modules import LoraModule

Parts = dict[str, tuple[str, str, RawTensor]]
"""The tensors of one linear layer: "A", "B", "magnitude" -> path of the layer, key, values."""

DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")  # in the keys of DoRA's magnitudes
VISION_REASON = (
    "of the model's vision or audio part, which is not served: set lora_text_only (--lora-text-only) to "
    "leave that out and serve the text part alone"
)
REFUSED = (
    (VISION, VISION_REASON),
    (re.compile(r"wpe.*\.lora_"), "adapters on the position embedding are not supported"),
    (
        re.compile(r"embed_tokens_per_layer\."),
        "adapters on the table of per-layer embeddings are not supported: train without it",
    ),
    (
        re.compile(r"\.(?:linear_attn|conv|mamba|mixer(?=\.(?:conv1d|norm|A_log|D|dt_bias)))\.(?!.*\.lora_)"),
        "of a recurrent layer only the linear layers can be adapted: train without this",
    ),
    (DORA, "this DoRA magnitude belongs to no known LoRA module"),
    (
        re.compile(r"^(?!.*\.lora_)"),
        "full weights and biases of this module are not supported: of modules_to_save the embedding, the "
        "head and norms are",
    ),
)
"""What is told of keys that no linear layer has: the first pattern that is found decides."""


def module_parts(
    tensors: Mapping[str, RawTensor], partial: list[str] | None, modules: Mapping[int, LoraModule] | None
) -> dict[tuple[int, int], Parts]:
    """The tensors of each (layer, module id) of a decoder. `stack_parts` does it for a model of two stacks.

    partial: takes a line for each key that is left out; None: such keys are refused. modules: the model's.
    Raises AdapterInvalidError.
    """
    seen = sorted(key for key in tensors if VISION.search(key))
    if seen and partial is None:
        rest = f" and {len(seen) - 1} other tensors are " if len(seen) > 1 else " is "
        raise AdapterInvalidError(f"{seen[0]}{rest}{VISION_REASON}")
    found: dict[tuple[int, int], Parts] = {}
    roots: dict[str, str] = {}
    for key, tensor in sorted(tensors.items()):
        match = PEFT_KEY.fullmatch(key)
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None:
            _leave_out(key, partial)
            continue
        roots.setdefault(match["root"], key)
        add_part(found.setdefault((layer_of(match), module_id), {}), match, tensor)
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return found


def add_part(parts: Parts, match: re.Match[str], tensor: RawTensor) -> None:
    """Add a tensor to those of its layer. match: of its key, with the groups `path` and `side`. Raises
    AdapterInvalidError where the layer has such a tensor already."""
    part, key = match["side"] or "magnitude", match.string
    if part in parts:
        raise AdapterInvalidError(f"{key} and {parts[part][0]} mean the same module")
    parts[part] = (match["path"], key, tensor)


def _leave_out(key: str, partial: list[str] | None) -> None:
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    # A module without its magnitude would be another adapter, so a magnitude may not be left out.
    if partial is None or (DORA.search(key) and not VISION.search(key)):
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")
