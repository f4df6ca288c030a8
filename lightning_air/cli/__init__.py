"""Training, and everything around it, from the command line (to come)."""
