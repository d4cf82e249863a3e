"""The formats of state files: checked blocks of rows."""
