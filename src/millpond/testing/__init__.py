"""What tests of a query's parts need: processors of the user, run without Spark."""

from millpond.testing.tester import PandasProcessorTester, ProcessorTester

__all__ = ["PandasProcessorTester", "ProcessorTester"]
