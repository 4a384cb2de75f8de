"""Result tables of runs and benchmarks."""
