"""What Spark's state store holds of a query, as rows for Millpond's operators, and whether the query made it."""
