"""Planning, and the merge that carries a plan out. No I/O and no collectives: testable with fake ranks."""
