"""What a user asks for, one module per verb, called from the command line and from Python."""
