"""State at a version, read without being served: for people, tools and checks."""
