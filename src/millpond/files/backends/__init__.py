"""Where bytes lie: local disks, object stores, and a store that fails by a seed."""
