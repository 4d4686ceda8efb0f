"""A tuned or untuned model, opened to sample from, to be evaluated or exported."""
