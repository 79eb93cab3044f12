"""RecentItems: recent answers of the Responses API, for clients that send references to them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_ITEMS = 4096
MAX_CHARACTERS = 2**24
Item = dict[str, Any]


class RecentItems:
    """Items by API key and id. The oldest are dropped first. Event loop only."""

    def __init__(self, max_items: int = MAX_ITEMS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_items, self._max_characters = max_items, max_characters
        self._items: OrderedDict[tuple[str, str], Item] = OrderedDict()
        self._num_characters = 0

    def add(self, owner: str, item: Item) -> None:
        self._items[owner, item["id"]] = item
        self._num_characters += _length(item)
        while len(self._items) > self._max_items or self._num_characters > self._max_characters:
            _, oldest = self._items.popitem(last=False)
            self._num_characters -= _length(oldest)

    def resolve(self, owner: str, given: Item) -> Item:
        """The item that a reference means. Other items, and references to dropped items, are returned as they
        are.
        """
        if given.get("type") not in (None, "item_reference") or "role" in given:
            return given
        return self._items.get((owner, str(given.get("id"))), given)


def _length(item: Item) -> int:
    if item["type"] == "function_call":
        return len(item["name"]) + len(item["arguments"])
    return sum(len(part["text"]) for part in item["content"])
