"""What a run tells people and programs while it goes on."""
