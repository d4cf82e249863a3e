"""The unaligned append store (FlowKV §4.2): lists of windows that close at different times."""
