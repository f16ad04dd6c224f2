"""What an epoch will read, before it is read: simulation, the plan and the warm-up."""
