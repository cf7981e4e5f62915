"""How good a checkpoint is: its weights, and its perplexity on text it has not seen."""
