"""External tables for lookup joins (`millpond.enrich`): the protocol, and PostgreSQL and Redis."""

from __future__ import annotations

from millpond.lookup.postgres import PostgresTable
from millpond.lookup.redis import RedisTable
from millpond.lookup.table import Connection, Found, LookupTable

__all__ = ["Connection", "Found", "LookupTable", "PostgresTable", "RedisTable"]
