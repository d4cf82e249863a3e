"""Run files wherever they lie: mapped on a local disk, copied there, or read through a cache of blocks."""
