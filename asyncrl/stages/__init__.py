"""Training on given data, by TRL: supervised, reward models, preferences, distillation (docs/stages.md)."""
