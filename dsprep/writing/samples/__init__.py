"""Samples that a program gives, one after another: checked, packed, and written by a job."""
