"""The file layer: file systems for all kinds of locations, formats of state files, and local copies."""
