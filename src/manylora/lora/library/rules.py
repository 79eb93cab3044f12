"""AdapterRules: what an adapter must be for a model to serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manylora.errors import AdapterInvalidError
from manylora.lora.extras import check_extras
from manylora.lora.modules import LoraModule
from manylora.lora.tensors import (
    Adapter,
    AdapterRow,
    adapter_from_rows,
    adapter_from_tensors,
    check_place,
    separate_fused,
)
from manylora.request import LoraExtra, LoraInput


@dataclass(frozen=True)
class AdapterRules:
    """modules: that adapters may have, by id. rank_limit: of a row. half: the model computes in float16, so
    values beyond its range are refused."""

    modules: Mapping[int, LoraModule]
    num_layers: int
    rank_limit: int
    half: bool = False

    def check(self, lora: LoraInput) -> Adapter:
        """Tensors, as a request brings them. Raises AdapterInvalidError."""
        check_extras(lora.extras, self.num_layers)
        return adapter_from_tensors(lora, self.modules, self.num_layers, self.rank_limit, self.half)

    def check_rows(
        self, rows: Iterable[AdapterRow], extras: Iterable[LoraExtra], digest: str | None = None
    ) -> Adapter:
        """Rows that a reader made, which are finite and of their size. digest: of all, where it is known.
        Raises AdapterInvalidError."""
        rows, extras = list(rows), list(extras)
        check_extras(extras, self.num_layers)
        if not (rows or extras):
            raise AdapterInvalidError("the adapter has no rows: it needs at least one")
        limits = self.modules, self.num_layers, self.rank_limit
        for row in rows:
            check_place(row.module_id, row.layer, row.format, row.payload.size, *limits)
        parts = (part for row in rows for part in separate_fused(row, self.modules))
        return adapter_from_rows(parts, self.half, extras, finite=True, digest=digest)
