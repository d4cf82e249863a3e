"""What a running query does, read from outside: for `millpond top`, and for Prometheus."""
