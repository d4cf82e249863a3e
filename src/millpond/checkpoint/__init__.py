"""From sealed deltas to durable versions: commits, manifests, generations, recovery, retention."""
