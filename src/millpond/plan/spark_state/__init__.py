"""State in Spark's state store: its rows for Millpond's operators, and checks that the query made it."""
