"""`unigrad-fast doctor`: reports what the machine has, what a run will use, what is missing, and which parts work.

torch, DALI, DeepSpeed and modules that import them are imported inside functions, because they may be missing.
"""
