"""Training of the bundled models: run from a checkout, no part of the wheel."""
