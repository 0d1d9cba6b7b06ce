"""What a teacher makes of finished responses, and which one it is."""
