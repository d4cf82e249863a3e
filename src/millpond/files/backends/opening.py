"""Handles of object stores: what they are opened with, and what is said where the environment lacks something."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store, from_url

from millpond.errors import SettingError, TransientError
from millpond.files.backends.uploads import PART, SLOWEST

_METADATA = ("/latest/api/token", "/latest/meta-data/iam/")
"""Where Amazon's machines are asked for the credentials of their role: who has others is not."""
_REFUSED = "status code: 4"

TIMEOUT = 30.0
"""Seconds that obstore gives a request, its body included, unless the environment says otherwise."""

_PREFIXES: dict[type[ObjectStore], str] = {S3Store: "AWS", GCSStore: "GOOGLE", AzureStore: "AZURE"}
"""Of the environment's variables for each kind of store."""

_CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "user_agent",
)


def for_creating(store: ObjectStore, url: str, options: Mapping[str, Any], size: int) -> ObjectStore:
    """The handle of a store for puts-if-absent of so many bytes.

    Args:
        store: that for all else. url, options: what it was opened with. size: of what is put.
    """
    if size <= PART and "retry_config" not in options:
        return store
    # Who puts something if it is absent tries again himself, as each time he has to see what has become of it.
    given = {name: value for name, value in options.items() if name != "retry_config"}
    if size > PART:  # the time-out is for the whole body
        client = options.get("client_options") or _client_options(store)
        given["client_options"] = {**client, "timeout": timedelta(seconds=TIMEOUT + size / SLOWEST)}
    return from_url(literally(url), **given)


def _client_options(store: ObjectStore) -> dict[str, str]:
    """What the environment says of a store's client: options that are given to that stand in place of all this."""
    prefix = next((prefix for kind, prefix in _PREFIXES.items() if isinstance(store, kind)), None)
    names = {name: f"{prefix}_{name.upper()}" for name in _CLIENT_OPTIONS if prefix is not None}
    return {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}


def literally(url: str) -> str:
    """A location as obstore reads it: its path is taken to the letter, as Hadoop takes it, and has no query."""
    scheme, mark, rest = url.partition("://")
    if scheme in ("http", "https"):
        return url
    authority, slash, path = rest.partition("/")
    return scheme + mark + authority + slash + quote(path)


def first_line(error: BaseException) -> str:
    """What an error says, without what a store answered behind it."""
    return str(error).partition("\n")[0].rstrip(".")


@contextmanager
def environment(url: str) -> Iterator[None]:
    """Tell what the environment lacks. Of a machine's role, the service may only have failed for the moment."""
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        said = first_line(error)
        if "builder error" in said and "BadScheme" in str(error):
            raise SettingError(
                "The store's endpoint has no TLS, and nothing allows that.",
                action="Set AWS_ALLOW_HTTP=true in the environment of driver and executors, or name one with https:.",
                file=url,
            ) from error
        if any(path in said for path in _METADATA):
            kind = SettingError if isinstance(error, FileNotFoundError) or _REFUSED in said else TransientError
            raise kind(
                "There are no credentials for the store in the environment, and the machine's metadata service, which "
                f"was asked for those of a role, gives none: {said}.",
                action="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of driver and executors, or "
                "give the machine a role.",
                file=url,
            ) from error
        raise
