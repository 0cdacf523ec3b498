"""What is counted and not measured: FLOPs and bytes of the kernels, a step without a card, what the compiler makes."""
