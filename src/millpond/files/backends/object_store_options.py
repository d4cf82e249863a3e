"""Client options of object stores, and errors for missing credentials and settings in the environment."""

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
from millpond.files.backends.uploads import MIN_BYTES_PER_SECOND, PART_BYTES
from millpond.humanize import first_line

_METADATA = ("/latest/api/token", "/latest/meta-data/iam/")
"""Paths of EC2's metadata service, which obstore asks for a role's credentials if the environment has none."""
_CLIENT_ERROR = "status code: 4"

REQUEST_SECONDS = 30.0
"""obstore's default time-out of a request in seconds, its body included."""

_PREFIXES: dict[type[ObjectStore], str] = {S3Store: "AWS", GCSStore: "GOOGLE", AzureStore: "AZURE"}
"""Prefix of environment variables, by kind of store."""

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


def store_for_create(store: ObjectStore, url: str, options: Mapping[str, Any], size: int) -> ObjectStore:
    """Return a store handle for puts-if-absent of an object.

    Args:
        store: the handle for all other requests.
        url, options: URL and options that `store` was opened with.
        size: size of the object in bytes.
    """
    if size <= PART_BYTES and "retry_config" not in options:
        return store
    # Callers of put-if-absent repeat it themselves, because they must check the outcome of each try.
    own_options = {name: value for name, value in options.items() if name != "retry_config"}
    if size > PART_BYTES:  # the time-out is for the whole body
        client = options.get("client_options") or _client_options(store)
        own_options["client_options"] = {
            **client,
            "timeout": timedelta(seconds=REQUEST_SECONDS + size / MIN_BYTES_PER_SECOND),
        }
    return from_url(quote_path(url), **own_options)


def _client_options(store: ObjectStore) -> dict[str, str]:
    """Read a store's client options from the environment, which obstore ignores once it gets `client_options`."""
    prefix = next((prefix for kind, prefix in _PREFIXES.items() if isinstance(store, kind)), None)
    names = {name: f"{prefix}_{name.upper()}" for name in _CLIENT_OPTIONS if prefix is not None}
    return {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}


def quote_path(url: str) -> str:
    """Percent-encode a location's path for obstore, so that it is taken literally, as by Hadoop; there is no query."""
    scheme, mark, rest = url.partition("://")
    if scheme in ("http", "https"):
        return url
    authority, slash, path = rest.partition("/")
    return scheme + mark + authority + slash + quote(path)


@contextmanager
def explain_environment(url: str) -> Iterator[None]:
    """Raise plain errors for missing credentials and settings in the environment.

    A failure of the metadata service may be temporary, so it is a `TransientError` unless the service refused.
    """
    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        message = first_line(error)
        if "builder error" in message and "BadScheme" in str(error):
            raise SettingError(
                "The store's endpoint has no TLS, and nothing allows that.",
                action="Set AWS_ALLOW_HTTP=true in the environment of driver and executors, or name one with https:.",
                file=url,
            ) from error
        if any(path in message for path in _METADATA):
            kind = SettingError if isinstance(error, FileNotFoundError) or _CLIENT_ERROR in message else TransientError
            raise kind(
                "There are no credentials for the store in the environment, and the machine's metadata service, which "
                f"was asked for those of a role, gives none: {message}.",
                action="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of driver and executors, or "
                "give the machine a role.",
                file=url,
            ) from error
        raise
