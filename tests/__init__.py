"""The suite. A package, so that the ranks of the pool find a test's functions by their import path."""
