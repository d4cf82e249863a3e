"""The ordered store: a multimap by key and event time, of immutable parts."""
