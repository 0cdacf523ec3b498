"""Measurements on the documentation's pages that no command makes. Run in a checkout; not in the wheel."""
