"""``python -m omniload``: the same as the ``omniload`` command."""

from omniload.cli import main

main()
