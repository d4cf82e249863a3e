"""Testing tools: run a user's stateful processor without Spark."""

from millpond.testing.tester import PandasProcessorTester, ProcessorTester

__all__ = ["PandasProcessorTester", "ProcessorTester"]
