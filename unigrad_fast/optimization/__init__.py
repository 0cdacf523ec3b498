"""Shared by training and evaluation: SGD, LARS and AdamW that drop non-finite steps, and schedules."""
