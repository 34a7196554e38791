"""Whose turn it is, and who may wait."""

from prompt_tuning.core.fair_queue import FairQueue


def filled(rows: str) -> FairQueue[str]:
    queue = FairQueue()
    for number, client in enumerate(rows):
        queue.put(client, f"{client}{number}")
    return queue


def test_clients_take_turns_and_keep_their_order():
    queue = filled("aaabcb")
    assert queue.remove("a1") and not queue.remove("a1")
    assert len(queue) == len(list(queue)) == 5
    assert [queue.pop() for _ in range(5)] == ["a0", "b3", "c4", "a2", "b5"]
    assert not queue


def test_the_next_item_that_fits_takes_the_turn_of_its_client():
    queue = filled("aabbc")
    assert queue.pop_if(lambda item: item in ("b3", "c4")) == "b3"
    assert queue.pop_if(lambda item: item == "b3") is None
    assert [queue.pop() for _ in range(4)] == ["a0", "c4", "b2", "a1"]
    assert not queue


def test_a_full_queue_has_room_for_a_client_with_less_than_its_share():
    queue = filled("a" * 6)
    assert queue.has_room("a", 2, limit=8) and not queue.has_room("a", 3, limit=8)
    assert queue.has_room("a", 3, limit=8, free=1)
    # Half of the limit is the share of each of two clients.
    assert queue.has_room("b", 4, limit=8) and not queue.has_room("b", 5, limit=8)
    # In all, twice as many may wait.
    assert not filled("a" * 8 + "bcdefghi").has_room("k", 1, limit=8)
