"""What LoHa and LoKr share: their scaling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from manylora.lora.formats.kinds.pairs import Pairs
from manylora.lora.formats.peft_config import config_of


def alphas_over_ranks(pairs: Pairs) -> Callable[[str, int | None], np.float32]:
    """(path of a module, rank of its matrices or None where they do not say) -> alpha / r, by the patterns of
    the settings. Raises AdapterInvalidError, as what it gives does."""
    settings = pairs.files.settings
    names = ("rank_pattern", "alpha_pattern")
    patterns = {name: settings[name] for name in names if name in settings}
    config = config_of({"lora_alpha": pairs.number("alpha", 8), "r": settings.get("r", 8), **patterns})

    def scale(path: str, rank: int | None) -> np.float32:
        if rank is not None:
            config.check_rank(path, rank)
        return np.float32(config.scale(path, config.rank(path)))

    return scale
