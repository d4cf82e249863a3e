"""State of a user's processor: variables over columns that a slot sent, and the changes made to them."""
