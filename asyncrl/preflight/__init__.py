"""What a user asks before a run: does the machine hold it, does the config fit, what will it need, do the rewards work."""
