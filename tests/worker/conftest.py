"""Fixtures of the slot's tests that the worker's tests use, too."""

from tests.slot.conftest import folder as folder
from tests.slot.conftest import task as task
