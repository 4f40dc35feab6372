"""The trainer on DeepSpeed."""
