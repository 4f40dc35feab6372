"""What a user begins with: a first task, the shipped model of the quick start, and small games."""
