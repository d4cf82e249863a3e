"""Storage tiers of run files: mapped in place, local copies, or remote reads through a cache of blocks."""
