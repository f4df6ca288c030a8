"""How the ranks find each other, share the model and stop together."""
