"""The workloads: the configuration of a run, its source and its query."""
