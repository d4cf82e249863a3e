"""The memory of a slot, shared by its tables."""

from __future__ import annotations

from threading import Lock

from millpond.stores.memory.process_memory import anonymous, trim

_WORKING = 8
"""The part of the budget (one in so many) that temporaries may take, for which tables hold no account."""
_PIECES = 8
_LARGEST_PIECE = 8 << 20
_RUNNING = 24 << 20
"""Bytes that threads, buffers of files and code loaded late take, whatever the budget (at most 3/8 of it)."""


class MemoryBudget:
    """How many bytes a slot may hold together: its tables, its caches, and what works on them.

    An eighth (at most 64 MB) is left to temporaries, which come in pieces, several of which are alive at a time, and a
    little to what a running process takes anyway. Half of the rest is split evenly: each table is sure of its part. The
    other half goes to whoever asks first, and is taken back, down to an even share of the whole, from tables that hold
    more when another is short of memory. Tables at rest have no part: they keep what they hold as long as it
    is no more than half of the whole, and nobody is short of memory.

    Args:
        total: bytes. At least a few megabytes a table, or tables spend their time moving rows in and out.

    Attributes:
        piece: bytes that one temporary should take at most.
        tables: bytes that tables and caches may hold together.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.piece = min(total // (_WORKING * _PIECES), _LARGEST_PIECE)
        self.tables = total - _PIECES * self.piece - min(_RUNNING, total * 3 // 8)
        self._relieve_at = anonymous() + self.tables
        self._full = self._relieve_at
        self._accounts: list[Account] = []
        self._lock = Lock()

    @property
    def used(self) -> int:
        """Bytes reserved by all tables."""
        return sum(account.reserved for account in self._accounts)

    def relieve(self) -> None:
        """Between two pieces of work: have what is freed given back, if the process is about to outgrow the budget."""
        if anonymous() > self._relieve_at:
            trim()
            # What is left is in use: not worth another try before there is more.
            self._relieve_at = max(self._full, anonymous() + self.piece)

    def open(self) -> Account:
        """An account for one more table."""
        account = Account(self)
        with self._lock:
            self._accounts.append(account)
        return account

    def _limit(self, account: Account) -> int:
        if account.resting:  # many may be, and all are asked before each batch
            held = sum(each.reserved for each in self._accounts if each.resting)
            return 0 if held > self.tables // 2 or any(each.short for each in self._accounts) else account.reserved
        others = [other for other in self._accounts if other is not account]
        short = any(other.short for other in others)
        sure = self._even // 2
        taken = sum(other.reserved if other.resting else max(0, other.reserved - sure) for other in others)
        limit = sure + max(0, self.tables // 2 - taken)
        return min(limit, 2 * sure) if short else limit

    @property
    def _even(self) -> int:
        """An even share for each table that is not at rest."""
        return self.tables // max(1, sum(not account.resting for account in self._accounts))


class Account:
    """One table's part of a `MemoryBudget`.

    Attributes:
        reserved: bytes that the table may use now.
        short: whether it was refused more than it has, though it has less than an even share.
        resting: whether nothing is looked for in the table for now.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.reserved = 0
        self.short = False
        self.resting = False

    @property
    def limit(self) -> int:
        """Bytes that the table could have at most, as things stand."""
        with self._budget._lock:
            return self._budget._limit(self)

    def reserve(self, wanted: int) -> bool:
        """Reserve `wanted` bytes in all. Returns False, changing nothing, if that is too much."""
        budget = self._budget
        with budget._lock:
            granted = wanted <= self.reserved or wanted <= budget._limit(self)
            if granted:
                self.reserved = wanted
            self.short = not granted and not self.resting and self.reserved < budget._even
            return granted

    def rest(self, resting: bool) -> None:
        """Say whether nothing will be looked for in the table for now."""
        with self._budget._lock:
            self.resting = resting
            self.short = self.short and not resting

    def force(self, wanted: int) -> None:
        """Reserve `wanted` bytes in all even if that is too much: they are in use already."""
        with self._budget._lock:
            self.reserved = wanted

    def close(self) -> None:
        """Give everything back."""
        with self._budget._lock:
            if self in self._budget._accounts:
                self._budget._accounts.remove(self)
            self.reserved = 0
