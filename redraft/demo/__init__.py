"""The bundled small DiffusionGemma: its checkpoint, the generators of its tasks and the recipe that trains it."""
