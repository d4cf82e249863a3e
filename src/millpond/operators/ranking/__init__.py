"""Top-N, and aggregates over each key's last rows, over rows and over changelogs."""
