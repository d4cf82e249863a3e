"""Compactions done elsewhere: how they are asked for, claimed and answered, in objects beside the state.

    compaction/<generation>/<id>.request       what is to be done, by a slot of that run
    compaction/<generation>/<id>.lease.<n>     a worker has it in hand; each further sign of life has the next number
    compaction/<generation>/<id>.free.<n>      the worker that had that lease has given it up
    compaction/<generation>/<id>.done          what was made of it, or why nothing
    files/<id>-<uuid>.run, .append             the files that were made

All but deletions are put-if-absent, under names of their own.

- *One result counts.* Only the slot that has put a request knows that it waits for it, in memory: it takes the first
  result, if it still holds the inputs, and never one that was made for another run, range or state. Whoever else works
  on the request finds a result there, and removes its own files.
- *A worker may die or stall at any time.* Whoever sees no new lease for some time, by its own clock, may take the next
  number. The slot looks for new leases by name; if none comes, or no result, it compacts itself. A worker that is told
  to end gives its lease up, so that the next number may be taken at once; what it had begun is not finished.
- *A result stays as long as it may come to be named.* As long as a request is there, files whose names begin with its
  id are not collected. The slot removes the request once a manifest that names the files is durable, or when it will
  not use a result any more. Collections list files, then requests, then commits: what is not protected any more was
  named before.
- *What a slot that died has left goes.* Requests of older runs at once; those of the run itself when no slot can wait
  for them any more (`LIMIT`), and no version that could name their files is opened any more.
"""
