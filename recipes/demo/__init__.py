"""The demo model's recipe: generators of its tasks, tokenizer, data, training, measuring."""
