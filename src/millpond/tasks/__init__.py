"""Data that travels between Spark's tasks and slots: the operator task, rows, offsets and figures."""
