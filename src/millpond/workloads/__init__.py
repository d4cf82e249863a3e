"""Streams to try Millpond on: NEXMark's generator, its Spark source and its queries."""
