"""The Stat table of FlowKV."""
