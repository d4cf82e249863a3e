"""FlowKV's Stat table."""
