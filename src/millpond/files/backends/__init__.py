"""Where bytes lie: local disks, object stores, HDFS, and a store that fails by a seed."""
