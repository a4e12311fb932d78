"""The verbs of dsprep, one module each, called from the command line and from Python."""
