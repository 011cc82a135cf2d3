"""Live tuning: everything that runs inside a job under `weft run --tune`."""
