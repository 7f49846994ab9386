"""The same questions to several forms of a model in one process: `redraft ab`, described in docs/ab.md."""
