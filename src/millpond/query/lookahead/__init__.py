"""Looking at what the source will give a batch later, so that the state of its keys is read meanwhile."""
