"""Storage backends: local disks, object stores and HDFS."""
