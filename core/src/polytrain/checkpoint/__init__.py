"""Checkpoints: files first, a manifest last; the manifests are the index."""
