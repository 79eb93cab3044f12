"""Protects where an activated LoRA begins to act: the last place of its invocation sequence."""

from __future__ import annotations

import random

from manylora.engine.sequence import find_last


def test_the_last_place_is_found() -> None:
    picks = random.Random(1)
    for _ in range(3000):
        tokens = tuple(picks.randrange(3) for _ in range(picks.randrange(12)))
        wanted = tuple(picks.randrange(3) for _ in range(picks.randint(1, 4)))
        places = [i for i in range(len(tokens)) if tokens[i : i + len(wanted)] == wanted]
        assert find_last(tokens, wanted) == (places[-1] if places else None), (tokens, wanted)


def test_long_sequences_that_nearly_fit_everywhere_take_no_time() -> None:
    """The product of the two lengths would be minutes."""
    wanted = (7,) * 4095 + (8, 7, 7)
    assert find_last((7,) * 1_000_000, wanted) is None
    assert find_last((*wanted, *(7,) * 100_000), wanted) == 0
