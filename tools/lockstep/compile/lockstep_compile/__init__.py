"""Exports a PyTorch module with its training graphs into one file; see exporter.py."""
