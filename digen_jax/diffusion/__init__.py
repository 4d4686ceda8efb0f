"""Flow matching: sigma schedules, reverse steps, sampling and replay; all pure functions (see `steps`)."""
