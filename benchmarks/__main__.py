"""`python -m benchmarks`."""

import sys

from benchmarks import cli
from benchmarks.papers import cli as papers

if __name__ == "__main__":
    sys.exit(papers.main(sys.argv[2:]) if sys.argv[1:2] == ["papers"] else cli.main())
