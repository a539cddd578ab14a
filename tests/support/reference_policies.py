"""The online policies in plain Python, written from their papers; nothing is shared with the compiled ones."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from featstore.cache.base import Int32s, Int64s, OnlinePolicy, PolicyContext


class ReferenceLRU(OnlinePolicy):
    def start(self, capacity: int, context: PolicyContext) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def hit(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            self.order.move_to_end(slot)

    def victims(self, n: int) -> Int32s:
        return np.array([self.order.popitem(last=False)[0] for _ in range(n)], np.int32)

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot not in self.order
            self.order[slot] = None


class ReferenceClock(OnlinePolicy):
    groups = 10

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.capacity = capacity
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def hit(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot in self.visited
            self.visited[slot] = True

    def victims(self, n: int) -> Int32s:
        found = []
        while len(found) < n:
            if self.visited.get(self.hand) is False:
                del self.visited[self.hand]
                found.append(self.hand)
            elif self.hand in self.visited:
                self.visited[self.hand] = False
            self.hand = (self.hand + 1) % self.capacity
        return np.array(found, np.int32)

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot not in self.visited
            self.visited[slot] = False


class ReferenceSieve(OnlinePolicy):
    """Algorithm 1 of the paper, on a list from the tail (oldest) to the head."""

    groups = 10

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.queue: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand: int | None = None  # a slot

    def hit(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot in self.visited
            self.visited[slot] = True

    def victims(self, n: int) -> Int32s:
        return np.array([self.evict() for _ in range(n)], np.int32)

    def evict(self) -> int:
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = at + 1 if at + 1 < len(self.queue) else 0
        self.hand = self.queue[at + 1] if at + 1 < len(self.queue) else None
        slot = self.queue.pop(at)
        del self.visited[slot]
        return slot

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        for slot in slots.tolist():
            assert slot not in self.visited
            self.queue.append(slot)
            self.visited[slot] = False


class ReferenceS3FIFO(OnlinePolicy):
    groups = 10

    def start(self, capacity: int, context: PolicyContext) -> None:
        self.main_limit = capacity - max(1, capacity // 10)
        self.most_small: float = capacity - self.main_limit
        self.small: deque[int] = deque()  # heads left, tails right
        self.main: deque[int] = deque()
        self.frequency: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.ghost: deque[int | None] = deque(maxlen=self.main_limit)  # None where a row came back

    def hit(self, slots: Int32s) -> None:
        for slot in slots.tolist():
            self.frequency[slot] = min(self.frequency[slot] + 1, 3)

    def victims(self, n: int) -> Int32s:
        self.most_small = float("inf") if n else self.most_small
        return np.array([self.evict() for _ in range(n)], np.int32)

    def evict(self) -> int:
        while True:
            if len(self.main) > self.main_limit or not self.small:
                slot = self.main.pop()
                if self.frequency[slot] > 0:
                    self.frequency[slot] -= 1
                    self.main.appendleft(slot)
                    continue
            else:
                slot = self.small.pop()
                if self.frequency[slot] > 1:
                    self.frequency[slot] = 0
                    self.main.appendleft(slot)
                    continue
                self.ghost.append(self.row[slot])
            del self.frequency[slot], self.row[slot]
            return slot

    def insert(self, rows: Int64s, slots: Int32s) -> None:
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            assert slot not in self.frequency
            self.frequency[slot] = 0
            self.row[slot] = row
            if row in self.ghost:
                self.ghost[self.ghost.index(row)] = None
                self.main.appendleft(slot)
            elif len(self.small) >= self.most_small:
                self.main.appendleft(slot)
            else:
                self.small.appendleft(slot)
