"""``python -m dsprep`` is the command line."""

from dsprep.cli import main

main()
