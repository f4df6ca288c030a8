"""GPU health: a sick GPU is named before the job dies of it (to come)."""
