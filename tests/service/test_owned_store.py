"""A bounded store: who fills it pushes out his own entries alone."""

from __future__ import annotations

from xllm_service.owned_store import OwnedStore


def test_an_owner_loses_his_own_oldest_entry_and_nobody_elses() -> None:
    store: OwnedStore[str, int] = OwnedStore(3, 100)
    store.put("quiet", "a", 0)
    for number in range(50):
        store.put("busy", str(number), number)
    assert store.get("quiet", "a") == 0
    assert [store.get("busy", str(number)) for number in (46, 47, 48, 49)] == [None, 47, 48, 49]
    assert len(store) == 4


def test_when_all_is_full_who_has_most_gives_way() -> None:
    store: OwnedStore[str, int] = OwnedStore(10, 6)
    for owner, count in (("a", 1), ("b", 4), ("c", 3)):
        for number in range(count):
            store.put(owner, str(number), number)
    assert len(store) == 6
    assert store.get("a", "0") == 0 and store.get("b", "0") is None and store.get("c", "2") == 2


def test_what_was_touched_stays_and_what_is_put_again_is_replaced() -> None:
    store: OwnedStore[str, int] = OwnedStore(2, 100)
    store.put("a", "x", 1)
    store.put("a", "y", 2)
    store.touch("a", "x")
    store.put("a", "z", 3)
    assert (store.get("a", "x"), store.get("a", "y")) == (1, None)
    store.put("a", "x", 4)
    assert store.get("a", "x") == 4 and len(store) == 2
    store.touch("nobody", "x")
    store.remove("a", "gone")
    store.remove("a", "x")
    assert store.get("a", "x") is None and len(store) == 1


def test_what_is_over_goes_of_every_owner() -> None:
    store: OwnedStore[str, int] = OwnedStore(10, 100)
    for number in range(6):
        store.put("ab"[number % 2], str(number), number)
    store.expire(lambda at: at < 4)
    assert len(store) == 2 and store.get("a", "4") == 4 and store.get("b", "5") == 5
    store.expire(lambda at: True)
    assert len(store) == 0
