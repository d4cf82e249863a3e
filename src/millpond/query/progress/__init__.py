"""Progress of a running query, read from outside: for `millpond top` and for Prometheus."""
