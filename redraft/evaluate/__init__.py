"""Measuring answers: tasks, graders, the sandbox for generated code, and runs over many items."""
