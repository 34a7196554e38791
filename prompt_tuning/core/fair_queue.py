"""A queue with turns: no client waits for all rows of another."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of many clients; each waits only for its own client's items.

    The first items of all clients come first, one after another, then the second ones.
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

        The client of the item has its next turn after all others.
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
        """Removes and returns an item; its client's next turn is after all others."""
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
        """Returns whether a client may add some items.

        All may add up to a limit. A client that has less than its share of it may add
        items even if the others have filled it, up to twice the limit in all.

        Args:
          client: the client.
          count: number of its new items.
          limit: number of items that may wait.
          free: number of new items that need not wait.
        """
        total = self._length + count - free
        if total <= limit:
            return True
        own = len(self._items.get(client, ())) + count
        clients = len(self._items) + (client not in self._items)
        return own <= max(limit // clients, 1) and total <= 2 * limit
