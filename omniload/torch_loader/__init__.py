"""The drop-in `DataLoader`: torch's own workers and arguments, with a state that resumes exactly.

::

    entry.py       DataLoader: of a dataset or of a mixture
    loader.py      DatasetLoader: the arguments, which pass comes next, state_dict and load_state_dict
    passes.py      what iterating gives, and what is asked of a pass over a dataset: how far it has come
    map_style.py   a pass over a map-style dataset: numbered batches of indices
    indices.py     where those indices come from, and the way back to a place among them
    iterable.py    a pass over an iterable dataset: one place in it for each worker
    work.py        what runs in the worker processes: batches, each with a note
    reading.py     the same for iterable datasets, where the note says how far the dataset has come
    state.py       parts of a saved state

A pass is iterated by a torch DataLoader of its own, over a view of the dataset whose items are finished batches, each
with a note of where it leaves the dataset. So fetching, transport, pinning, time-outs and errors are torch's.
"""
