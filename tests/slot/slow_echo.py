"""As `echo`, but it takes its time to be imported."""

import time

from millpond.slot.server import Slot
from millpond.slot.template import main
from tests.slot.echo import Echo

if __name__ == "__main__":
    time.sleep(4)
    main(lambda directory, number, listener: Slot(directory, listener, Echo(directory, number)).run())
