"""The demo's two engines: the job, the process of each engine, its measurements, and the comparison of results."""
