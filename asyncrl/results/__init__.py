"""What a user asks of a run that has begun or ended: its page, its curves, its samples, its model."""
