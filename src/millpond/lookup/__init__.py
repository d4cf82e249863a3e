"""Tables outside of Spark that streams are enriched from (`millpond.enrich`): what they offer, and two kinds."""

from __future__ import annotations

from millpond.lookup.postgres import PostgresTable
from millpond.lookup.redis import RedisTable
from millpond.lookup.table import Connection, Found, LookupTable

__all__ = ["Connection", "Found", "LookupTable", "PostgresTable", "RedisTable"]
