"""Networks of hosts on this machine. Each host is a network namespace that can be cut off from a bridge; needs root."""

from __future__ import annotations

import os
import random
import subprocess

import pytest


class Network:
    """A bridge of this machine, and network namespaces that are connected to it, by number.

    Args:
        seed: of the addresses, so that two networks rarely have the same.
    """

    def __init__(self, seed: int) -> None:
        drawn = random.Random(f"{os.getpid()} {seed}")
        self._name = f"mp{drawn.randrange(16**6):06x}"
        self._prefix = f"10.{drawn.randrange(64, 128)}.{drawn.randrange(256)}"
        self._plugged: set[int] = set()
        try:
            _ip("link", "add", self._name, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network can be made here: {error}")
        _ip("addr", "add", f"{self.driver}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")

    @property
    def driver(self) -> str:
        """Address of this machine in the network, for processes outside the namespaces."""
        return f"{self._prefix}.254"

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"{self._prefix}.{number + 1}"

    def plug(self, number: int) -> list[str]:
        """Make a host's namespace if there is none; return the command that runs another command in it."""
        name, cable = f"{self._name}-{number}", self._cable(number)
        if number not in self._plugged:
            self._plugged.add(number)
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", self._name, "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        return ["ip", "netns", "exec", name]

    def cut(self, number: int) -> None:
        """Drop all packets from and to a host; its connections stay open."""
        _ip("link", "set", self._cable(number), "down")

    def heal(self, number: int) -> None:
        """Connect a host again that was cut off."""
        _ip("link", "set", self._cable(number), "up")

    def close(self) -> None:
        """Remove the bridge and the namespaces; their processes must have ended."""
        for number in self._plugged:
            _ip("netns", "del", f"{self._name}-{number}")
        _ip("link", "del", self._name)

    def _cable(self, number: int) -> str:
        return f"{self._name}-{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
