"""The bundled small DiffusionGemma: its checkpoint and the held-out items of its tasks. `recipes/demo` makes both."""
