"""Replay: whether a repeated batch makes the same rows and the same state."""
