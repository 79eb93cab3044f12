"""Which rows of a PEFT file are plain: one pair of matrices each, in the order that the cache has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from manylora.kernels.row_format import RowFormat
from manylora.lora.file_adapter import FileRows
from manylora.lora.formats.peft_names import in_our_order, in_peft_order
from manylora.lora.formats.peft_parts import Parts
from manylora.lora.formats.plain_rows import PlainRows
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.modules import EXPERT_IDS, LoraModuleId

SPECIAL_MODULES = (*EXPERT_IDS, LoraModuleId.CROSS_ATTN_QKV)  # modules whose rows are not one pair each
IN_PLACE = {"F32": "float32", "BF16": "bfloat16"}  # types of such files


def find_plain(
    found: Mapping[tuple[int, int], Parts],
    options: ReadOptions,
    scale_of: Callable[[str, int, int], float],
) -> PlainRows | None:
    """found: by layer and module id. scale_of: of B, by path, module id and rank. None: there is more to one
    of the rows, or they are of several types."""
    kinds = {tensor.dtype for parts in found.values() for *_, tensor in parts.values()}
    if len(kinds) != 1 or not kinds <= IN_PLACE.keys():
        return None
    rows, inputs, outputs, file = [], [], [], None
    for (layer, module_id), parts in sorted(found.items()):
        if set(parts) != {"A", "B"} or module_id in SPECIAL_MODULES:
            return None
        (path, _, a), (_, _, b) = parts["A"], parts["B"]
        if a.offset is None or b.offset is None or a.file is not b.file or file not in (None, a.file):
            return None
        order = np.arange(b.shape[0])
        turned = in_peft_order(path, module_id, order, options.module(module_id, layer))
        turned = in_our_order(path, module_id, turned, options.module(module_id, layer))
        if turned is not order and (np.diff(turned) != 1).any():
            return None
        file, rank = a.file, a.shape[0]
        rows.append((module_id, layer, rank, a.offset, b.offset, scale_of(path, module_id, rank)))
        inputs.append(a.shape[1])
        outputs.append(b.shape[0])
    if file is None:
        return None
    known = {rank: RowFormat(rank) for _, _, rank, *_ in rows}
    table = FileRows.of(file.name, IN_PLACE[kinds.pop()], rows)
    formats = tuple(known[rank] for rank in table.table["rank"].tolist())
    return PlainRows(table, np.array(inputs), np.array(outputs), formats)
