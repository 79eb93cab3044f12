"""ReadOptions: how the files of an adapter are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from manylora.kernels.row_format import RowFormat
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats.base_weights import BaseReader, BaseWeights
from manylora.lora.formats.layouts import KnownLayouts
from manylora.lora.modules import LoraModule
from manylora.lora.rules import AdapterRules


@dataclass(frozen=True)
class ReadOptions:
    """modules: the model's, whose dimensions the matrices of PEFT and NeMo must then have; None: not known.
    base: what PEFT's DoRA magnitudes are normalised with, and its extras are relative to; None refuses them.
    bounds: judged by headers, before a value is read. allow_bin: read PEFT's adapter_model.bin, in a process
    of its own; for tools. float8: numbers of 8 bits stay so; else they are widened to bfloat16. digest: take
    that of each row of PEFT as it is read, where the adapter's will be wanted. bfloat16: narrow such rows
    then, for pages of that type, where they are large; those of routed experts stay as they are. text_only:
    leave out what an adapter has for a model's vision part, which is refused otherwise. num_layers: of the
    model, where the bounds do not know it. shared: rows may be vectors beside matrices that others have too;
    else each has its own. alike: remembers what adapters have in common; None: each is judged on its own.
    tell: takes a line for each thing that is served and may not be what was meant.
    """

    modules: Mapping[int, LoraModule] | None = None
    base: BaseWeights | None = None
    bounds: Bounds = ANY_MODEL
    allow_bin: bool = False
    float8: bool = True
    digest: bool = False
    bfloat16: bool = False
    text_only: bool = False
    num_layers: int | None = None
    shared: bool = False
    alike: KnownLayouts | None = None
    tell: Callable[[str], None] = lambda line: None

    @property
    def depth(self) -> int | None:
        """Layers of the model; None: not known."""
        return self.bounds.num_layers or self.num_layers

    def module(self, module_id: int, layer: int) -> LoraModule | None:
        """The model's, with the sizes of this layer; None: not known."""
        found = self.modules.get(module_id) if self.modules else None
        return found.at(layer) if found is not None else None

    def open_base(self) -> AbstractContextManager[BaseReader | None]:
        return self.base.open() if self.base is not None else nullcontext()

    def check_row(self, module_id: int, layer: int, row: RowFormat, elements: int) -> None:
        """As of `AdapterRules`, with what is known. Raises AdapterInvalidError."""
        num_layers, rank = self.bounds.num_layers, self.bounds.rank
        if self.modules is not None and num_layers is not None:
            AdapterRules(self.modules, num_layers, rank).check_row(module_id, layer, row, elements)


DEFAULT = ReadOptions()
