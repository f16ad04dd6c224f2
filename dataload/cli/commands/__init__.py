"""What each command does; `dataload.cli.app` brings them together. Nothing heavy is imported until one needs it."""
