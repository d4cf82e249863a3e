"""State as a user's processor has it: variables over columns that a slot sent, and what was changed in them."""
