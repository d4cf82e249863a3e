"""What a slot is handed with a batch, and what goes back: the task, its rows, its offsets, its figures."""
