"""State partitions of a slot: one writer each, attempts in turn, state sealed before output."""
