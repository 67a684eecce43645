"""What a mixture will do to a run, from its plans alone, before it is one.

::

    dry_run.py      DryRun: the plans of a run, on metadata
    epoch_size.py   how long a pass over a source is
    evenness.py     how even ranks are, by each way of balancing, and the time a step takes
    forecast.py     Forecast: all of it in numbers, for people to read
"""
