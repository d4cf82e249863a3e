"""One module per kind of operator: its spec, and the properties that follow from the spec."""
