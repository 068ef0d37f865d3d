"""How shareable images are made."""
