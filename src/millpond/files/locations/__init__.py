"""Locations: opening a backend by URL, and file systems that wrap one (counting, hedged, forked, faulty)."""
