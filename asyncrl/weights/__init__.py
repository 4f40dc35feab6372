"""The weights plane: learner to generators."""
