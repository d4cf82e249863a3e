"""Parsing of PostgreSQL connection strings by libpq's rules.

Ambiguous strings are rejected and never quoted in errors. An unescaped delimiter in a password makes its remainder
parse as a host or database, and clients and servers print those.
"""

from __future__ import annotations

import re

from millpond.errors import UsageError

_URI = re.compile(r"postgres(ql)?://([^:@/?#]*(:[^@/?]*)?@)?[^@/?#]*(/[^@?#]*)?(\?[^@#]*)?")
_HOST = re.compile(r"[/@][^@]*|[\w.-]*|[0-9a-fA-F:.]+(%\w+)?")
"""One host: a socket's folder or name, a host name, or an IPv4 or IPv6 address."""


def parse_conninfo(conninfo: str, table: str) -> dict[str, str] | None:
    """Parse a connection string.

    Returns:
        Parameters by libpq's names; None where psycopg, which parses them, is not installed.

    Raises:
        UsageError: the string is malformed or ambiguous.
    """
    good = isinstance(conninfo, str) and (not conninfo.startswith("postgres") or bool(_URI.fullmatch(conninfo)))
    parts = None
    try:
        from psycopg.conninfo import conninfo_to_dict

        parts = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    except ImportError:
        pass
    except Exception:  # the error's text may contain a part of the password
        good = False
    if good and (parts is None or _is_unambiguous(parts)):
        return parts
    jdbc = "Drop `jdbc:`. " if str(conninfo).startswith("jdbc:") else ""
    raise UsageError(
        f"How to connect to the PostgresTable {table} cannot be read.",
        action=f"{jdbc}Write it like postgresql://user:password@host:5432/database?sslmode=require, with what is no "
        "letter or number in a password by a per cent sign (%40 for @, %2F for /, %25 for %), or like "
        "host=… port=5432 dbname=… user=… password='…', with a backslash before ' and \\; options are those of libpq.",
    )


def _is_unambiguous(parts: dict[str, str]) -> bool:
    """Check that hosts, ports and database look like such, and not like a part of a password."""
    hosts = [host for name in ("host", "hostaddr") for host in parts.get(name, "").split(",")]
    ports = re.fullmatch(r"[0-9,]*", parts.get("port", ""))
    return all(_HOST.fullmatch(host) for host in hosts) and bool(ports) and "://" not in parts.get("dbname", "")


def secret_values(conninfo: str) -> list[str]:
    """Return the values of a connection string that libpq marks as secret (it shows them as asterisks)."""
    from psycopg.pq import Conninfo

    options = Conninfo.parse(conninfo.encode())
    return [option.val.decode(errors="replace") for option in options if option.dispchar == b"*" and option.val]
