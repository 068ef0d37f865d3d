"""What each command can be asked for: frozen settings in groups. No torch is imported here."""
