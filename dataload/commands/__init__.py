"""What each command does; `dataload.cli` brings them together. Nothing heavy is imported until one needs it."""
