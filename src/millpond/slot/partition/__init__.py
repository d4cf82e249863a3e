"""State partitions inside a slot: one writer each, batches in turn, sealed before their output."""
