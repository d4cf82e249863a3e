"""Functions of the user's as Spark has pickled them: loaded, and digested with all the code that they refer to."""
