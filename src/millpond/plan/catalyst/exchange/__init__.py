"""Planning of the map side of an exchange: a planner strategy in Java, and its installation."""
