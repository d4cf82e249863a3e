"""The headlines of the papers, measured again: `python -m benchmarks papers`."""
