"""What is handed to dist_checkpointing, and the calls that users make. All collectives of the package are here."""
