"""What an operator computes, as plain data: operators, types, functions. Read by plan, query and slot alike."""
