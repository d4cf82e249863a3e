"""An operator's exchange: Python stages around it, map sides of a batch, partial aggregation, initial state."""
