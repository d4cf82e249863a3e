"""Operator specs as plain data: operators, types, functions; shared by planner, query and slot."""
