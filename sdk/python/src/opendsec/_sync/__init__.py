# Made by tools/generate_sync.py from opendsec/_async/__init__.py. DO NOT EDIT.
"""The sync side, generated from ``opendsec._async`` by tools/generate_sync.py."""
