"""Results of a run that is going on or over: its report, metrics, samples, evaluation and exported model."""
