"""Speculative decoding with two models: one guesses the next tokens, the other confirms them."""

from __future__ import annotations

from collections.abc import Callable


def speculate(
    prompt: list[int],
    max_tokens: int,
    draft_tokens: int,
    guess: Callable[[list[int], int], list[int]],
    confirm: Callable[[list[int], list[int]], tuple[list[int], bool]],
) -> list[int]:
    """The new tokens.

    guess: (all tokens so far, count) to at most `count` tokens of the draft model.
    confirm: (all tokens so far, guessed ones) to those that the target model confirms and one of its own, and
    whether the sequence has ended.
    """
    output: list[int] = []
    ended = False
    while len(output) < max_tokens and not ended:
        tokens = [*prompt, *output]
        count = min(draft_tokens, max_tokens - len(output) - 1)
        new, ended = confirm(tokens, guess(tokens, count) if count > 0 else [])
        output += new
    return output
