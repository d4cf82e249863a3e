"""The memory budget of a slot, shared by its tables."""

from __future__ import annotations

from threading import Lock

from millpond.stores.memory.process_memory import anonymous_bytes, trim

_TEMPORARIES_DIVISOR = 8
"""Divisor of the budget: an eighth of it is for temporaries, which no table accounts for."""
_MAX_PIECES = 8  # temporaries alive at a time
_MAX_PIECE_BYTES = 8 << 20  # of one temporary
_PROCESS_BYTES = 24 << 20
"""Bytes for threads, file buffers and late-loaded code, whatever the budget (at most 3/8 of it)."""


class MemoryBudget:
    """The bytes that a slot may hold in its tables, its caches and the temporaries of running work.

    An eighth (at most 64 MB) is for temporaries, which come in pieces, several of them alive at a time. A small amount
    is for the running process itself. Half of the remainder is split evenly: each table is guaranteed its part. The
    other half goes to the table that asks first. When another table is short of memory, tables that hold more than an
    even share of the whole have to shrink to that share. Idle tables have no share. They keep their memory as long as
    they hold no more than half of the whole together, and no other table is short of memory.

    Args:
        total: bytes; at least a few megabytes per table, or tables spend their time moving rows in and out.

    Attributes:
        piece: bytes of one temporary, at most.
        tables: bytes of all tables and caches together, at most.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.piece = min(total // (_TEMPORARIES_DIVISOR * _MAX_PIECES), _MAX_PIECE_BYTES)
        self.tables = total - _MAX_PIECES * self.piece - min(_PROCESS_BYTES, total * 3 // 8)
        self._trim_at = anonymous_bytes() + self.tables
        self._first_trim_at = self._trim_at
        self._accounts: list[Account] = []
        self._lock = Lock()

    @property
    def used(self) -> int:
        """Bytes reserved by all tables."""
        return sum(account.reserved for account in self._accounts)

    def trim_if_needed(self) -> None:
        """Return freed heap memory to the system if the process is about to outgrow the budget; call between pieces."""
        if anonymous_bytes() > self._trim_at:
            trim()
            # The remaining memory is in use: do not trim again before there is more of it.
            self._trim_at = max(self._first_trim_at, anonymous_bytes() + self.piece)

    def open(self) -> Account:
        """Open an account for one more table."""
        account = Account(self)
        with self._lock:
            self._accounts.append(account)
        return account

    def _limit(self, account: Account) -> int:
        if account.idle:  # may be many, and each is checked before each batch
            held = sum(other.reserved for other in self._accounts if other.idle)
            return 0 if held > self.tables // 2 or any(other.short for other in self._accounts) else account.reserved
        # Each table is guaranteed half of an even share; the other half of the memory is shared freely.
        others = [other for other in self._accounts if other is not account]
        short = any(other.short for other in others)
        guaranteed = self._even_share // 2
        taken = sum(other.reserved if other.idle else max(0, other.reserved - guaranteed) for other in others)
        limit = guaranteed + max(0, self.tables // 2 - taken)
        # While a table is short of memory, the others may not exceed an even share.
        return min(limit, 2 * guaranteed) if short else limit

    @property
    def _even_share(self) -> int:
        """An even share for each table that is not idle."""
        return self.tables // max(1, sum(not account.idle for account in self._accounts))


class Account:
    """One table's part of a `MemoryBudget`.

    Attributes:
        reserved: bytes that the table may use now.
        short: whether a request was refused although the table has less than an even share.
        idle: whether no look-ups are expected in the table for now.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.reserved = 0
        self.short = False
        self.idle = False

    @property
    def limit(self) -> int:
        """Bytes that the table could have now, at most."""
        with self._budget._lock:
            return self._budget._limit(self)

    def reserve(self, wanted: int) -> bool:
        """Reserve `wanted` bytes in total. Returns False, changing nothing, if that is too much."""
        budget = self._budget
        with budget._lock:
            granted = wanted <= self.reserved or wanted <= budget._limit(self)
            if granted:
                self.reserved = wanted
            # `short` makes other tables shrink to an even share. Only a table in use with less than that may set it.
            self.short = not granted and not self.idle and self.reserved < budget._even_share
            return granted

    def set_idle(self, idle: bool) -> None:
        """Mark the table as idle, or as in use again."""
        with self._budget._lock:
            self.idle = idle
            self.short = self.short and not idle

    def force(self, wanted: int) -> None:
        """Reserve `wanted` bytes in total even if that is too much, because they are in use already."""
        with self._budget._lock:
            self.reserved = wanted

    def close(self) -> None:
        """Release the whole reservation."""
        with self._budget._lock:
            if self in self._budget._accounts:
                self._budget._accounts.remove(self)
            self.reserved = 0
