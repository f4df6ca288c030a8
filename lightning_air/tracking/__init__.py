"""MLflow tracking that never blocks and never overflows (to come)."""
