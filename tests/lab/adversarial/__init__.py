"""Trials that try to make dsprep wrong, crash, hang or grow; see README.md beside this."""
