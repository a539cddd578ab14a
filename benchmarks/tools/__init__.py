"""Tools of the benchmarks."""
