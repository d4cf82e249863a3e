"""The path from sealed deltas to durable versions: commits, manifests, generations, recovery, retention."""
