"""Checkpoints that go on from the state of another, sharing its files: where those are, and what keeps them there.

A *fork* is a checkpoint of its own, with commits, generations and files of its own. Its first commit holds the
manifests of the version that it was made from; what they name lies in the *parent*, and has names here that say so
(`files/backends/forked.py`). No file is copied, and none is ever written by two queries: whoever wrote a file owns it,
and alone deletes it.

Three objects tell what is shared:

    <fork>/millpond/parents.json     where the parents are, and under which name each of them knows this fork
    <parent>/millpond/forks/<id>     a *pin*: the names of all objects there that the fork may read
    <fork>/millpond/commits/…        manifests, which name some of these, and over time fewer and fewer

A fork never comes to name an object of a parent that the pin does not hold: all that it names it has from its first
commit. So pins do not change; they are written once, and removed once.

Why nothing is removed that a fork needs, whatever crashes and when:

- *The pin is there first.* It is written before anything that names what it holds. So a crash leaves a pin too many,
  and a fork without the last of its documents (Spark's `metadata`), which no query is started on.
- *Nothing pinned was on its way out.* When the pin stands, the fork looks once more at Spark's ledger of the parent: it
  can still go back to the version that is forked. Every collection of garbage reads that ledger first, then lists, then
  reads the pins, then deletes. One that read the ledger before that look keeps the version and all that it names; one
  that read it later sees the pin.
- *The pin goes last.* A fork removes it when no manifest that it retains has named anything of that parent for a while:
  by the rules, and by the same code, by which it removes files of its own. A manifest names only what those before it
  named, or what its run wrote; so nothing of the parent is named again.
- *What cannot be read is kept.* A pin that is damaged ends a collection before it deletes anything.

A fork of a fork has its own pins, with each location that has files of it: none of them relies on the pins of another
fork. While they are written, the version in the fork between, retained as above, keeps that one's.

A copy of a fork, made by other means, has no pins: it is refused as long as the fork itself is there, and never removes
the pins of that. A fork that was moved does not remove them either.
"""
