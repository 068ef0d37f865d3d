"""How shareable images are made, and handed on with their promise."""
