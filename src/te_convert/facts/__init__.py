"""Read-only findings about modules, by numeric probe and by inspection."""
