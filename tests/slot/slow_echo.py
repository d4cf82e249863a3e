"""As `echo`, but it takes its time to be imported."""

import time

from millpond.slot.template import main
from tests.slot.echo import serve

if __name__ == "__main__":
    time.sleep(4)
    main(serve)
