"""`python -m millpond`: the command line, where scripts are not on the path."""

from millpond.cli import main

if __name__ == "__main__":
    main()
