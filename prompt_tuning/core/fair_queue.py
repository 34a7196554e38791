"""A queue with turns: no client waits for all items of another."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items from many clients, served in turns.

    The first items of all clients come first, then the second ones, and so on.
    """

    def __init__(self):
        self._items: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for items in self._items.values():
            yield from items

    def put(self, client: Hashable, item: Item) -> None:
        """Adds an item of a client."""
        self._items.setdefault(client, deque()).append(item)
        self._length += 1

    def pop(self) -> Item:
        """Removes and returns the next item; there must be one.

        The item's client then goes to the end of the line.
        """
        return self._take(*next(iter(self._items.items())), 0)

    def pop_if(self, fits: Callable[[Item], bool]) -> Item | None:
        """Removes and returns the next item that fits; None if none does."""
        for client, items in self._items.items():
            for number, item in enumerate(items):
                if fits(item):
                    return self._take(client, items, number)
        return None

    def _take(self, client: Hashable, items: deque[Item], number: int) -> Item:
        """Removes and returns an item; its client then goes to the end of the line."""
        item = items[number]
        del items[number], self._items[client]
        if items:
            self._items[client] = items
        self._length -= 1
        return item

    def remove(self, item: Item) -> bool:
        """Removes an item; returns whether it was there."""
        for client, items in self._items.items():
            if item in items:
                items.remove(item)
                self._length -= 1
                if not items:
                    del self._items[client]
                return True
        return False

    def has_room(self, client: Hashable, count: int, limit: int, free: int = 0) -> bool:
        """Tests whether a client may add `count` items.

        Together, clients may add up to `limit`. A client with less than its share may
        add items even when the rest have filled the queue, up to twice the limit in
        all. `free` of the new items do not have to wait.
        """
        total = self._length + count - free
        if total <= limit:
            return True
        waiting = len(self._items.get(client, ())) + count
        clients = len(self._items) + (client not in self._items)
        return waiting <= max(limit // clients, 1) and total <= 2 * limit
