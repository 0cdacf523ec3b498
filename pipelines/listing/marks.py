"""Names of files: a folder that has all of them holds pictures of a training run, not images to train on."""

OF_A_RUN: set[bytes] = set()  # whoever writes such folders adds theirs; while it is empty there are none
