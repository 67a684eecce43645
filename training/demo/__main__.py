"""`python -m training.demo`: the same as `omniload demo`."""

from training.demo.cli import app

app()
