"""The demo's result as plain data, as a page and as a picture."""
