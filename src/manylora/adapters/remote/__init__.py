"""Adapters from where they live: buckets, web servers, OCI registries, the Hugging Face hub."""
