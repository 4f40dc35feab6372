"""Trainers: the policy, its optimizer, its checkpoints."""
