"""From prompts to answers: the runners of passes, the loop over requests, and the public engine."""
