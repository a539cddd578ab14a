"""The promises of the papers; ``python -m benchmarks.papers`` measures their own figures."""
