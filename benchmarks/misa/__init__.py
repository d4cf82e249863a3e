"""MiSA's workloads, Linear Road and Cluster Monitoring: `python -m benchmarks.misa`."""
