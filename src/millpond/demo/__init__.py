"""`millpond demo`: one job on Spark's RocksDB and on Millpond, both killed and restarted, every row compared."""
