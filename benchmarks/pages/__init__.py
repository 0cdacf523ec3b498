"""Measurements for the documentation that are not part of a command. Run in a checkout; not in the wheel."""
