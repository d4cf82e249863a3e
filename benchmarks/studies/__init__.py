"""Single measurements and checks, each started by its name: `python -m benchmarks.studies.NAME`."""
