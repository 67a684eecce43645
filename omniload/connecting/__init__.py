"""Connecting: ranks that share lanes get them from one of their number, over process groups of the loader's own.

::

    source rank     runtime ──► cut and pack, once per view ──┬──► its own part ──────────────► client
                                                              │ gloo, one thread on each rank
    other ranks                                               └──► unpack, derive the rest ───► client

    circles.py    who receives from whom, and what of the lanes: pure functions of a mesh
    runs.py       the tokens that a view has, as runs of neighbours of one document
    packing.py    lanes to flat arrays and back; what can be derived does not travel
    messages.py   steps, the end and errors as bytes
    board.py      what is said outside of process groups: errors met before there are any, ranks that are lost
    peers.py      the process groups: the only place that communicates otherwise
    handoff.py    one step ready for the training loop while the next one is on its way
    runtime.py    the thread of each rank, which goes through the steps together with the others
    host.py       `connect`: what makes a loader's host one of these

Nothing here changes what is loaded: a rank gets what it would have loaded by itself, or a slice of that.
"""
