"""The only room that knows Megatron-core's names and their differences between versions."""
