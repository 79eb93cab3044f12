"""Leaves out what PEFT may have trained of keys and values in layers that read another layer's.

Older releases of transformers have such matrices there, and train with them where there is no cache; newer
ones have none, and load these adapters without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from manylora.lora.formats.peft_names import MODULE, layer_of, module_id_of
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.tensor_files import RawTensor

OF_MODULE = re.compile(MODULE)


def without_unused(tensors: Mapping[str, RawTensor], options: ReadOptions) -> Mapping[str, RawTensor]:
    """tensors: by PEFT's names. Tells of those left out."""
    modules = options.modules or {}
    if not any(module.unused for module in modules.values()):
        return tensors
    unused = []
    for key in tensors:
        match = OF_MODULE.match(key)
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None or module_id not in modules:
            continue
        if layer_of(match) in modules[module_id].unused:
            unused.append(key)
    if unused:
        more = f" and {len(unused) - 1} other tensors are" if len(unused) > 1 else " is"
        options.tell(
            f"{min(unused)}{more} of layers that read the keys and values of another layer: without effect"
        )
    return {key: tensor for key, tensor in tensors.items() if key not in unused}
