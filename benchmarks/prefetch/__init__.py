"""Row latencies where state is larger than memory, with and without prefetching: `python -m benchmarks.prefetch`."""
