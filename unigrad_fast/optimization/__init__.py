"""What training and evaluation share: SGD, LARS and AdamW that drop bad steps, schedules."""
