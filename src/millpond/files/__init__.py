"""Where bytes live: the file layer and the formats of state files."""
