"""Commands that check or try a config before a run: `validate`, `plan`, `doctor`, `reward test`."""
