"""The read-modify-write store (FlowKV §4.3): a hot table over hash-ordered runs, with eviction by access time."""
