"""Bytes on storage, and the manifest file. A backend never decides sharding, and sharding never touches bytes."""
