"""Pretraining: `loop` walks through a run, `trainer` makes a step, the others are its parts."""
