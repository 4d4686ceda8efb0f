"""Fixtures of all tests of what lies between processes."""

from tests.remote.rooms import room  # noqa: F401
