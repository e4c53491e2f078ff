"""What lies on disk: manifests, atomic publishing, conversations, token rows, hidden-state shards."""
