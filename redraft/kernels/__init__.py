"""The operations of a pass, one per file: formula, torch reference (the specification), fast versions, dispatch."""
