"""The ordered store: a multimap by key and event time, made of immutable parts."""
