"""The hot table: finding, inserting, evicting and expiring rows of words."""
