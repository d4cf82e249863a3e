"""Forks: checkpoints that continue from the state of another checkpoint and share its files.

A *fork* is an independent checkpoint with its own commits, generations and files. Its first commit holds the manifests
of the version that it was forked from. The objects that these manifests name stay in the *parent*; the fork refers to
them by names below `parents/` (`files/locations/forked.py`). No file is copied, and no file is ever written by two
queries. The location that wrote a file owns it, and only its query deletes it.

Three objects describe the sharing:

    <fork>/millpond/parents.json     the locations of the parents, and the name of the fork's pin in each
    <parent>/millpond/forks/<id>     a *pin*: the names of all objects of the parent that the fork may read
    <fork>/millpond/commits/…        manifests, which name some of these objects, over time fewer and fewer

A fork names only objects of a parent that its first commit named, and the pin holds all of these. So pins do not
change: they are written once, and removed once.

No garbage collection removes an object that a fork needs, whatever crashes and when:

- *The pin is written first*, before any document that names the pinned objects. So a crash leaves a superfluous pin,
  and a fork without its last document (Spark's `metadata`). No query starts on such a fork.
- *Pinned objects were not about to be deleted.* After writing the pin, the fork reads the parent's offset log again. It
  checks that Spark can still go back to the forked version. Every garbage collection reads that log first, then lists,
  then reads the pins, then deletes. A collection that read the log before this check retains the version and all its
  objects. A collection that read it later sees the pin.
- *The pin is removed last.* A fork removes it once no retained manifest has named an object of that parent for a while.
  The rules and the code are those for the fork's own files. A manifest names only objects that its predecessors named
  or its run wrote. So the fork never names an object of that parent again.
- *Unreadable pins keep everything.* A damaged pin ends a collection before it deletes anything.

A fork of a fork has its own pins in every location that has files of it; it does not rely on the pins of another fork.
While these pins are written, the fork in between retains the version, as above, and so keeps its own pins.

A copy of a fork that was made by other means has no pins. It is refused as long as the original fork exists, and it
never removes the pins of the original. A fork that was moved does not remove its pins either.
"""
