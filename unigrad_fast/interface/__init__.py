"""The commands from Python: `pretrain`, `evaluate.knn` and the others, `export`, `load_encoder`.

Each takes the options of the command of its name, checks them in the same way and calls the same code.
"""
