"""The commands, one module each. A command imports heavy packages when it runs, so that `--help` stays fast."""
