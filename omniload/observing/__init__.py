"""What a running job tells about itself, and who reads it.

::

    stats.py       JobStats: the numbers of a job at one moment, as values
    timing.py      Timing: how long the last calls took
    job_dir.py     where jobs of this machine publish their numbers, and how they are found
    events.py      EventLog: what happened, a JSON line each
    metrics.py     the numbers as Prometheus metrics
    exporter.py    MetricsServer: serves them over HTTP
    dashboard.py   the Grafana dashboard of the metrics, dashboard.json
    screen.py      the numbers as text for a terminal, for `omniload top`

::

    roles ──► Timing ──► JobStats ──┬──► publish ──► stats.json ──► omniload top
      │                             └──► MetricsServer ──► Prometheus ──► Grafana
      └───► EventLog ──► events.jsonl

Who runs the job makes a `JobStats` about once a second. Nothing here knows how the roles are hosted.
"""
