"""Streams of records: SegSpeedStr of Linear Road, TaskEvents of Cluster Monitoring."""
