"""The slot: a long-lived process that owns state partitions, with its protocol, partitions and prefetching."""
