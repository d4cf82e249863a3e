"""Formats of a checkpoint's objects: small documents, manifests, and commits with their deltas."""
