"""Servers that tests start: downloads of their programs, their processes, and faults between them and clients."""
