"""Remote compaction: the protocol of requests, leases and results, as objects beside the state.

    compaction/<generation>/<id>.request       the job, written by a slot of that run
    compaction/<generation>/<id>.lease.<n>     a worker holds the job; each renewal has the next number
    compaction/<generation>/<id>.free.<n>      the worker that held lease n has released it
    compaction/<generation>/<id>.done          the result, or the error
    files/<id>-<uuid>.run, .append             the files of the result

All writes are put-if-absent, under unique names; deletions are the only other operation.

- *One result counts.* Only the slot that wrote a request waits for it, and keeps that in memory. The slot takes the
  first result if it still holds the inputs. It never takes a result for another run, range or state. Another worker on
  the same request finds the result, and removes its own files.
- *A worker may die or stall at any time.* If a worker sees no new lease for some time, by its own clock, it may take
  the next number. The slot looks for new leases by name. Without a new lease or a result, the slot compacts by itself.
  A worker that is shut down releases its lease, so that the next number is available at once; its job is not finished.
- *A result stays while a manifest may still name it.* As long as a request exists, files whose names begin with its id
  are not collected. The slot removes the request once a manifest that names the files is durable, or once it will not
  use the result. Collections list files, then requests, then commits. So a used file that lost its protection is
  already named by a commit in the list.
- *Requests of dead slots are removed.* Requests of older runs are removed at once. Requests of the current run are
  removed after two conditions hold: no slot can still wait for them (`MAX_WAIT_SECONDS`), and no version that could
  name their files can be opened.
"""
