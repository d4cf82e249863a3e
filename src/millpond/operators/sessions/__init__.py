"""Session windows: cutting a batch into pieces of sessions, merging sessions, and closing them."""
