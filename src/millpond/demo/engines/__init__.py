"""The demo's two engines side by side: the job, each engine's process, what was measured of it, the comparison."""
