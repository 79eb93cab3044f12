"""ReadOptions: how the files of an adapter are read. KnownLayouts: where rows are in files seen before."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats.base_weights import BaseReader, BaseWeights
from manylora.adapters.formats.safe_files import OpenFile
from manylora.adapters.modules import LoraModule
from manylora.adapters.rules import AdapterRules
from manylora.adapters.tensors import FileRows
from manylora.kernels.row_format import RowFormat

MAX_LAYOUTS = 64  # of adapters of one model; the one that was used longest ago is forgotten


@dataclass(frozen=True)
class FileLayout:
    """Where the rows of an adapter are in its file, if each is one pair of matrices stored as they are
    served.

    rows: their offsets. inputs, outputs: [rows], the dimensions of each.
    """

    rows: FileRows
    inputs: np.ndarray
    outputs: np.ndarray
    formats: tuple[RowFormat, ...]


class KnownLayouts:
    """Layouts of adapters of one model, by their settings and file headers. An adapter with the same settings
    and header is read by the layout, without further checks. Only adapters without notes are remembered.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, FileLayout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._layouts)

    def find(self, settings: Mapping[str, Any], file: OpenFile) -> FileLayout | None:
        """file: its header must have been read."""
        key = _layout_key(settings, file)
        with self._lock:
            if (layout := self._layouts.get(key)) is not None:
                self._layouts.move_to_end(key)
            return layout

    def keep(self, settings: Mapping[str, Any], file: OpenFile, layout: FileLayout) -> None:
        """settings, file: as in `find`, of an adapter that was read successfully."""
        with self._lock:
            self._layouts[_layout_key(settings, file)] = layout
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)


def _layout_key(settings: Mapping[str, Any], file: OpenFile) -> bytes:
    names = settings.get("target_modules")  # PEFT writes a set, in any order
    if isinstance(names, list):
        settings = {**settings, "target_modules": sorted(names)}
    text = json.dumps(settings).encode()
    sizes = f"{len(text)} {file.size} {file.name}\n".encode()
    return blake3(sizes).update(text).update(file.header).digest()


@dataclass(frozen=True)
class ReadOptions:
    """modules: the model's, whose dimensions the matrices of PEFT and NeMo must have; None: not known. base:
    normalises PEFT's DoRA magnitudes and is what extras are relative to; None: these are refused. bounds:
    checked against headers before values are read. allow_bin: also read PEFT's adapter_model.bin; for tools.
    float8: keep 8-bit floats; otherwise they become bfloat16. digest: compute the digest of each PEFT row
    while it is read. bfloat16: with `digest`, narrow large adapters for pages of that type, except routed
    experts. text_only: leave out tensors for a model's vision part, which are refused otherwise. rows_only:
    refuse what is no row. partial: a list that receives a line for each part that is left out instead; None:
    such adapters are refused. num_layers: of the model, if the bounds do not know it. shared: rows may be
    vectors that refer to shared matrices; otherwise each row has its own matrices. layouts: of adapters read
    before; None: none are remembered. tell: receives a line for each setting that may not have the intended
    effect.
    """

    modules: Mapping[int, LoraModule] | None = None
    base: BaseWeights | None = None
    bounds: Bounds = ANY_MODEL
    allow_bin: bool = False
    float8: bool = True
    digest: bool = False
    bfloat16: bool = False
    text_only: bool = False
    rows_only: bool = False
    partial: list[str] | None = None
    num_layers: int | None = None
    shared: bool = False
    layouts: KnownLayouts | None = None
    tell: Callable[[str], None] = lambda line: None

    @property
    def depth(self) -> int | None:
        """The number of layers of the model; None: not known."""
        return self.bounds.num_layers or self.num_layers

    def module(self, module_id: int, layer: int) -> LoraModule | None:
        """The model's, with the sizes of this layer; None: not known."""
        found = self.modules.get(module_id) if self.modules else None
        return found.at(layer) if found is not None else None

    def open_base(self) -> AbstractContextManager[BaseReader | None]:
        return self.base.open() if self.base is not None else nullcontext()

    def check_row(self, module_id: int, layer: int, row: RowFormat, elements: int) -> None:
        """Like `AdapterRules.check_row`, if the model is known. Raises AdapterInvalidError."""
        num_layers, rank = self.bounds.num_layers, self.bounds.rank
        if self.modules is not None and num_layers is not None:
            AdapterRules(self.modules, num_layers, rank).check_row(module_id, layer, row, elements)


DEFAULT = ReadOptions()
