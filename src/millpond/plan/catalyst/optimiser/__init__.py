"""Results of Spark's own optimiser: the place and form of conditions, joins, and the columns in use."""
