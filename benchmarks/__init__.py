"""Each program prints a table with a peer or a bound beside it: ``python -m benchmarks.<name> --help``."""
