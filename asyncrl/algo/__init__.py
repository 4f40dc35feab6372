"""Pure mathematics: torch and arithmetic on flat action tokens. No I/O, no collectives, no config objects."""
