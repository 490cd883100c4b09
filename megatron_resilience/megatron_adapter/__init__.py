"""The only importer of Megatron. A new release of Megatron is this folder's work."""
