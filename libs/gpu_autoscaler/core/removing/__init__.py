"""What leaves, how, and what keeps it: the steps of `plan` that remove, and what they ask."""
