# Made by tools/unasync.py from opendsec/_async/__init__.py. DO NOT EDIT.
"""The sync side, generated from ``opendsec._async`` by tools/unasync.py."""
