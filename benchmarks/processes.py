"""Processes in which variants are measured."""

import multiprocessing
import os


def end_with_parent() -> None:
    """For a thread: a process of a pool would outlive a parent that is killed, and keep its memory."""
    multiprocessing.parent_process().join()
    os._exit(1)
