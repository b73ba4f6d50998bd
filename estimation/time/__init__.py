"""Step time in closed form: docs/step_time.md."""
