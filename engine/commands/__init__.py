"""What a subcommand does."""
