"""`unigrad-fast doctor`: what the machine has, what a run will use, what is missing, and whether each part works.

torch, DALI, DeepSpeed and what imports them are imported inside functions: one of them may be what is missing.
"""
