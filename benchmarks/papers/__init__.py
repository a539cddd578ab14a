"""What the papers promise; ``python -m benchmarks.papers`` measures their own figures."""
