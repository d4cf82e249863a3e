"""What a checkpoint's objects hold: small documents, manifests, and commits with the deltas in them."""
