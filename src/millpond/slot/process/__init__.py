"""Slots as processes: their directory, identity, connections and messages."""
