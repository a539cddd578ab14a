"""The memory ledger against a model: requests, loans, releases and deaths in any order, and from many threads at once."""

from __future__ import annotations

import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from featstore.budget import Budget, HeldMemory, Loan, Reservation
from featstore.errors import BudgetError

TOTAL = 200
sizes = st.integers(0, 90)


class Holder:
    """Holds a least, which it keeps, and more, which it lends; gives back at least ``step`` bytes at a time. Thread-safe."""

    def __init__(self, budget: Budget, least: int, cost: int, step: int) -> None:
        self._budget, self.least, self.cost, self._step = budget, least, cost, step
        self.held = budget.reserve(f"holder {cost}", least)
        self._more: list[Reservation] = []
        self._lock = threading.Lock()  # which nobody holds who reserves: give_back waits for it
        self.loan: Loan = budget.lend(self.lent, self.give_back, cost=cost, of=f"more {cost}")

    def lent(self) -> int:
        return sum(each.n_bytes for each in list(self._more))

    def grow(self, n_bytes: int) -> bool:
        """Take more, if it is free: nobody gives anything back for what is useful alone."""
        more = self._budget.try_reserve(f"more {self.cost}", n_bytes)
        if more is not None:
            with self._lock:
                if not self.lent():
                    self.loan.renew()
                self._more.append(more)
        return more is not None

    def give_back(self, n_bytes: int) -> int:
        with self._lock:
            left = wanted = min(self.lent(), max(n_bytes, self._step))
            while left:
                more = self._more[-1]
                freed = min(left, more.n_bytes)
                more.resize(more.n_bytes - freed)
                left -= freed
                if not more.n_bytes:
                    self._more.pop()
            return wanted

    def keep(self) -> list[Reservation]:
        """Lend no longer; return all that is held from now on."""
        self.loan.end()
        return [self.held, *self._more]

    def end(self) -> None:
        for each in self.keep():
            each.release()


class Ledger(RuleBasedStateMachine):
    """One budget; the model is the sum of what must stay: leasts, reservations, and what is lent no longer."""

    holders: Bundle[Holder] = Bundle("holders")
    taken: Bundle[Reservation] = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.since = 0.0, dict[int, float]()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("featstore.budget.time", SimpleNamespace(monotonic=lambda: self.now))
        self.budget = Budget(TOTAL)
        self.living: list[Holder] = []
        self.held: list[Reservation] = []

    def teardown(self) -> None:
        self.patch.undo()

    def fixed(self) -> int:
        return sum(each.n_bytes for each in self.held) + sum(holder.least for holder in self.living)

    def fits(self, more: int) -> bool:
        return self.fixed() + more <= TOTAL

    @initialize(target=holders, leasts=st.lists(st.integers(0, 20), min_size=2, max_size=5))
    def some_are_there(self, leasts: list[int]) -> Any:
        self.living += [Holder(self.budget, least, cost % 4, 1 + 7 * cost) for cost, least in enumerate(leasts)]
        return multiple(*self.living)

    @rule(target=holders, least=sizes, cost=st.integers(0, 3), step=st.integers(1, 50))
    def begin(self, least: int, cost: int, step: int) -> Any:
        if not self.fits(least):
            with pytest.raises(BudgetError):
                Holder(self.budget, least, cost, step)
            return multiple()
        holder = Holder(self.budget, least, cost, step)
        self.living.append(holder)
        return holder

    @rule(holder=holders, n_bytes=sizes)
    def grow(self, holder: Holder, n_bytes: int) -> None:
        free = self.budget.available
        assert holder.grow(n_bytes) == (n_bytes <= free)

    def take_all(self, shares: list[int]) -> None:
        """As caches that size themselves do: whatever is asked for next has to come from loans."""
        for holder, share in zip(self.living, shares, strict=False):
            assert holder.grow(self.budget.available // share)

    @rule(target=taken, n_bytes=sizes, shares=st.lists(st.integers(1, 4), max_size=5))
    def reserve(self, n_bytes: int, shares: list[int]) -> Any:
        self.take_all(shares)
        fits, lent = self.fits(n_bytes), {id(holder): holder.lent() for holder in self.living}
        try:
            reservation = self.budget.reserve("asked", n_bytes)
        except BudgetError as error:
            assert not fits, "refused while a loan was out"
            assert error.needed is not None
            assert not self.budget.on_loan
            return multiple()
        assert fits
        self.held.append(reservation)
        gave = [holder for holder in self.living if holder.lent() < lent[id(holder)]]
        dearest = max((holder.cost for holder in gave), default=-1)
        assert all(not holder.lent() for holder in self.living if holder.cost < dearest), "a dearer loan was taken first"
        return reservation

    @rule(reservation=taken, n_bytes=sizes)
    def resize(self, reservation: Reservation, n_bytes: int) -> None:
        before = reservation.n_bytes
        fits = self.fits(n_bytes - before)
        if fits:
            reservation.resize(n_bytes)
        else:
            with pytest.raises(BudgetError):
                reservation.resize(n_bytes)
        assert reservation.n_bytes == (n_bytes if fits else before)

    @rule(n_bytes=sizes)
    def what_is_optional(self, n_bytes: int) -> None:
        free, lent = self.budget.available, self.budget.on_loan
        found = self.budget.try_reserve("optional", n_bytes)
        assert (found is not None) == (n_bytes <= free)
        assert self.budget.on_loan == lent
        if found is not None:
            found.release()

    @rule(n_bytes=sizes)
    def owner_dies(self, n_bytes: int) -> None:
        class Owner:
            pass

        owner, used = Owner(), self.budget.used
        if self.fits(n_bytes):
            self.budget.reserve("owned", n_bytes, owner=owner)
            lent = used - (self.budget.used - n_bytes)
            assert lent >= 0
            del owner
            assert self.budget.used == used - lent

    @rule(reservation=consumes(taken))
    def release(self, reservation: Reservation) -> None:
        reservation.release()
        reservation.release()
        self.held = [each for each in self.held if each is not reservation]

    @rule(holder=consumes(holders))
    def end(self, holder: Holder) -> None:
        holder.end()
        self.living = [each for each in self.living if each is not holder]

    @rule(holder=consumes(holders))
    def lends_no_longer(self, holder: Holder) -> None:
        self.held.extend(holder.keep())
        self.living = [each for each in self.living if each is not holder]

    @invariant()
    def adds_up(self) -> None:
        budget = self.budget
        assert budget.used == self.fixed() + budget.on_loan <= TOTAL
        assert budget.on_loan == sum(holder.lent() for holder in self.living)
        assert budget.peak <= TOTAL

    @invariant()
    def reports_each_loan(self) -> None:
        """Under its own name, and since it was lent anew; a second passes after each step."""
        budget, report = self.budget, self.budget.report()
        assert (report.used, report.on_loan, report.available) == (budget.used, budget.on_loan, budget.available)
        assert (report.total, report.peak) == (TOTAL, budget.peak)
        assert sum(report.values()) == budget.used
        lenders = [holder for holder in self.living if holder.lent()]
        self.since = {id(holder): self.since.get(id(holder), self.now) for holder in lenders}
        for cost in range(4):
            alike = [holder for holder in lenders if holder.cost == cost]
            held = report.holders.get(f"more {cost}", HeldMemory(0))
            assert held.on_loan_bytes == sum(holder.lent() for holder in alike)
            assert held.on_loan_s == max((self.now - self.since[id(holder)] for holder in alike), default=0)
            assert not report.holders.get(f"holder {cost}", HeldMemory(0)).on_loan_bytes
        self.now += 1


TestLedger = Ledger.TestCase
TestLedger.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("seed", range(8))
def test_threads_that_stay_within_their_parts_are_never_refused(seed: int) -> None:
    """Leasts fit together; all beyond is on loan and taken back under way: no refusal, no deadlock, no livelock, no byte lost."""
    n_threads, part = 6, 50
    budget = Budget(n_threads * part)
    failed: list[BaseException] = []
    begin = threading.Barrier(n_threads)

    def work(number: int) -> None:
        rng = random.Random(100 * seed + number)
        try:
            holder = Holder(budget, part // 5, rng.randrange(4), rng.randrange(1, 40))
            begin.wait()
            mine: list[Reservation] = []
            for _ in range(300):
                free = part - holder.least - sum(each.n_bytes for each in mine)
                what = rng.random()
                if what < 0.4 and free:
                    mine.append(budget.reserve("asked", rng.randint(0, free)))
                elif what < 0.6 and mine:
                    mine.pop(rng.randrange(len(mine))).release()
                elif what < 0.7 and mine:
                    each = rng.choice(mine)
                    each.resize(rng.randint(0, each.n_bytes + free))
                else:
                    holder.grow(rng.randint(0, 3 * part))
                assert budget.used <= budget.total
            for each in mine:
                each.release()
            holder.end()
        except BaseException as error:
            failed.append(error)
            begin.abort()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not failed, failed
    assert budget.peak <= budget.total
    assert budget.used == 0
    assert budget.report() == {}


def test_threads_that_read_do_not_wait_for_those_that_wait_for_them() -> None:
    budget = Budget(100)
    waiting, other = AllOnLoan(budget, "waiting", cost=0, waits=True), AllOnLoan(budget, "other", cost=1)
    waiting.held.resize(60)
    other.held.resize(40)
    with budget.awaited():
        budget.reserve("reads", 40)
        with pytest.raises(BudgetError, match="reads needs"):
            budget.reserve("reads", 1)
    assert (waiting.held.n_bytes, other.held.n_bytes) == (60, 0)
    budget.reserve("asks", 1)
    assert waiting.held.n_bytes == 0


class AllOnLoan:
    """Holds memory of which everything is on loan, so that every true report has as much of it lent as held."""

    def __init__(self, budget: Budget, name: str, cost: int = 0, *, waits: bool = False) -> None:
        self.held = budget.reserve(name, 0)
        self.loan = budget.lend(self.lent, self.give_back, cost=cost, of=self.held, waits=waits)

    def lent(self) -> int:
        return self.held.n_bytes

    def give_back(self, n_bytes: int) -> int:
        freed = self.held.n_bytes
        self.held.release()
        return freed


def test_a_report_is_of_one_moment() -> None:
    n_threads, n_reports, names = 3, 0, set[str]()
    budget, over = Budget(100 * n_threads), threading.Event()
    interval = sys.getswitchinterval()

    def change(number: int) -> None:
        rng, holder = random.Random(number), AllOnLoan(budget, f"holder {number}")
        while not over.is_set():
            holder.held.resize(rng.randint(0, 100))

    threads = [threading.Thread(target=change, args=(number,)) for number in range(n_threads)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while n_reports < 3_000 or len(names) < n_threads:
            report, n_reports = budget.report(), n_reports + 1
            assert all(held.bytes == held.on_loan_bytes for held in report.holders.values()), report
            assert report.used <= report.peak <= budget.total
            names |= report.keys()
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
