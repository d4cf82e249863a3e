"""Slots as processes: where they live, who they are, what they say to each other."""
