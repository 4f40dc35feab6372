"""What the learner reports of a step: metrics, samples, timeline."""
