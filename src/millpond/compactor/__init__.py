"""Remote compaction: the worker process (see `checkpoint.compaction` for the protocol)."""
