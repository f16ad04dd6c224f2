"""What a run saw: its ledger, read again."""

from dataload.replay.run import Run, Seen, Step

__all__ = ["Run", "Seen", "Step"]
