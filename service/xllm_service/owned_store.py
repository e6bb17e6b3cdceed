"""A bounded store whose entries have owners: nobody's entries push out another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class OwnedStore(Generic[_K, _V]):
    """Keeps the newest entries of each owner. Not for two threads at once.

    Args:
        max_per_owner: entries of one owner; the oldest one goes when there are more.
        max_total: entries of all; then it is the oldest one of the owner who has most.
    """

    def __init__(self, max_per_owner: int, max_total: int) -> None:
        self._max_per_owner = max_per_owner
        self._max_total = max_total
        self._entries: dict[str, OrderedDict[_K, _V]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, owner: str, key: _K) -> _V | None:
        """Return an entry, or None; its place among the owner's stays."""
        entries = self._entries.get(owner)
        return None if entries is None else entries.get(key)

    def touch(self, owner: str, key: _K) -> None:
        """Make an entry the owner's newest one."""
        if key in self._entries.get(owner, {}):
            self._entries[owner].move_to_end(key)

    def put(self, owner: str, key: _K, value: _V) -> None:
        """Add an entry as the owner's newest, in place of one with the same key."""
        self.remove(owner, key)
        entries = self._entries.setdefault(owner, OrderedDict())
        entries[key] = value
        self._size += 1
        if len(entries) > self._max_per_owner:
            self._drop_oldest(owner)
        if self._size > self._max_total:
            self._drop_oldest(max(self._entries, key=lambda one: len(self._entries[one])))

    def remove(self, owner: str, key: _K) -> None:
        """Take an entry out, where there is one."""
        entries = self._entries.get(owner)
        if entries is not None and key in entries:
            del entries[key]
            self._forget(owner)

    def expire(self, is_over: Callable[[_V], bool]) -> None:
        """Take out each owner's entries from the oldest on, while they are over."""
        for owner in list(self._entries):
            while (entries := self._entries.get(owner)) and is_over(next(iter(entries.values()))):
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        self._entries[owner].popitem(last=False)
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        self._size -= 1
        if not self._entries[owner]:
            del self._entries[owner]
