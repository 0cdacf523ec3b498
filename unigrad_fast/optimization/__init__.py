"""What training and evaluation share: LARS, SGD that drops bad steps, schedules."""
