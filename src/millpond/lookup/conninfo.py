"""How to reach a PostgreSQL server, as libpq reads it. What cannot be read for sure is refused, and never quoted.

A password with a character that ends it makes a host or a database of its rest, which clients and servers then tell.
"""

from __future__ import annotations

import re

from millpond.errors import UsageError

_URI = re.compile(r"postgres(ql)?://([^:@/?#]*(:[^@/?]*)?@)?[^@/?#]*(/[^@?#]*)?(\?[^@#]*)?")
_HOST = re.compile(r"[/@][^@]*|[\w.-]*|[0-9a-fA-F:.]+(%\w+)?")
"""One host: a socket's folder or name, a name or an address, one of IPv6."""


def parts_of(conninfo: str, table: str) -> dict[str, str] | None:
    """What a connection string says, by libpq's names of it; None where psycopg, which reads it, is not installed.

    Raises:
        UsageError: it cannot be read.
    """
    good = isinstance(conninfo, str) and (not conninfo.startswith("postgres") or bool(_URI.fullmatch(conninfo)))
    parts = None
    try:
        from psycopg.conninfo import conninfo_to_dict

        parts = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    except ImportError:
        pass
    except Exception:  # its text may have a part of the password
        good = False
    if good and (parts is None or _sure(parts)):
        return parts
    jdbc = "Drop `jdbc:`. " if str(conninfo).startswith("jdbc:") else ""
    raise UsageError(
        f"How to connect to the PostgresTable {table} cannot be read.",
        action=f"{jdbc}Write it like postgresql://user:password@host:5432/database?sslmode=require, with what is no "
        "letter or number in a password by a per cent sign (%40 for @, %2F for /, %25 for %), or like "
        "host=… port=5432 dbname=… user=… password='…', with a backslash before ' and \\; options are those of libpq.",
    )


def _sure(parts: dict[str, str]) -> bool:
    """Whether hosts, ports and database look like such, and not like a part of a password."""
    hosts = [host for name in ("host", "hostaddr") for host in parts.get(name, "").split(",")]
    ports = re.fullmatch(r"[0-9,]*", parts.get("port", ""))
    return all(_HOST.fullmatch(host) for host in hosts) and bool(ports) and "://" not in parts.get("dbname", "")


def secrets_of(conninfo: str) -> list[str]:
    """The values of a connection string that libpq shows as asterisks."""
    from psycopg.pq import Conninfo

    options = Conninfo.parse(conninfo.encode())
    return [one.val.decode(errors="replace") for one in options if one.dispchar == b"*" and one.val]
