"""The async side, which is written; ``opendsec._sync`` is generated from it by tools/generate_sync.py."""
