"""How good a model is at text, and how far from another: perplexity and KL divergence."""
